"""Acceptance length by real decoding: proposers, sampling, what may differ, and the tables."""
