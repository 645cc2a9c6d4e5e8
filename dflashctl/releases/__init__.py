"""Deploys and releases: the files here, the plan, the way inside, rollbacks, the lock."""
