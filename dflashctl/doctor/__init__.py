"""Is a box fit for a run? Facts (gather.py) -> one line a check (checks.py, rules_*.py) with its meaning."""
