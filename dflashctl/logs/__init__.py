"""A run's log: followed byte by byte, and searched over there."""
