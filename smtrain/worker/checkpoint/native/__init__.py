"""Checkpoints of the native engine."""
