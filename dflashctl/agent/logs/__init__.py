"""A run's log: read on, searched, and scanned for trouble."""
