"""Who holds the GPUs of this machine, and which run they are given to."""
