"""Runs that are over: listed, noted, pruned, repaired and brought home."""
