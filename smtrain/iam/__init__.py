"""Least-privilege policies for a config: what its jobs may do, and what whoever starts them may."""

from smtrain.iam.api import policies

__all__ = ["policies"]
