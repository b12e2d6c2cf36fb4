"""A run on one page: its jobs, curves, costs and waste."""
