"""Processes, sessions, signals and control groups of this machine, as /proc and the kernel tell them."""
