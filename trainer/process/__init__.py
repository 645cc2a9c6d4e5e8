"""One process of a run: its files and figures, its signals, and how others see that it lives or why not."""
