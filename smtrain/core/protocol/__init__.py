"""What both halves agree on: /opt/ml, the lines of a log, which checkpoints belong together, and who owns them."""
