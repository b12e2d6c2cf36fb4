"""Jobs that exist: their state, losses, checkpoints and files, and lists of jobs."""
