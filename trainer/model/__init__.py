"""The frozen target with its taps, and the drafter that reads them."""
