"""Least-privilege policies for a config: for its jobs' role, and for the user who starts them."""

from smtrain.client.iam.policies import policies, trust_policy_of

__all__ = ["policies", "trust_policy_of"]
