"""Runs of the past: listed, compared and brought home."""
