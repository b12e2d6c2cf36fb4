"""Several trainings of one config with other values, and the best of them."""
