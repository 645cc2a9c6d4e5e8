"""What `doctor`, `inspect` and `probe` ask of a place."""
