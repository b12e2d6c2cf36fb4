"""The training run: schedule, metrics, resume and the loop that drives an engine."""
