"""Load, check and write a config: all that only the side of the user does with it."""
