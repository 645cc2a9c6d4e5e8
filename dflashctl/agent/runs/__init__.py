"""Live runs: started, supervised, looked at and ended."""
