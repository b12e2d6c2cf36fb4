"""torch.save's containers and pickles, read and written without torch."""
