"""Programs that `probe` sends and runs in the Python of a host, beside its torch. They import each other and
torch alone: nothing of dflashctl is there, and nothing need be deployed."""
