"""A run on one page: what ran, how it learned, what it cost and what of that was wasted."""
