"""What torch is set to on a host or in a run, where each value comes from, and how two of them differ.

`programs/` travels and runs beside torch; the rest is pure but `reading`, which asks.
"""
