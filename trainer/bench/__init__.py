"""What a step costs, beside what its matrix products alone would cost: `python -m trainer bench`."""
