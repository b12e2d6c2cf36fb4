"""Checkpoints of Megatron-LM: the legacy form and torch_dist."""
