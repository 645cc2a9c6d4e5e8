"""Checkpoints: their format, writing them beside training, going on from one."""
