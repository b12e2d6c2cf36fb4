"""A job that exists: its state, losses, checkpoints and files, and how jobs are listed."""
