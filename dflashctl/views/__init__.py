"""What is shown of runs, releases and checks, for people and as a document."""
