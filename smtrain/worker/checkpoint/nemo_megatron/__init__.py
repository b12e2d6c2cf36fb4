"""Checkpoints of neuronx-nemo-megatron."""
