"""A run's folder, which runs a question means, and what a caller and an operation say to each other."""
