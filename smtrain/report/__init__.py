"""Pictures of a run: for a terminal, and as a file."""
