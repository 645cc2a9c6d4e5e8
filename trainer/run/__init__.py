"""A run from beginning to end: what it loads, checks, does step by step, and leaves in its folder."""
