"""Least-privilege policies for a config: what its jobs may do, and what whoever starts them may."""

from smtrain.iam.policy import caller_policy, role_policy, trust_policy

__all__ = ["caller_policy", "role_policy", "trust_policy"]
