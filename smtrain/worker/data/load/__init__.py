"""Token batches for training and validation."""
