"""Least-privilege policies for a config: what its jobs may do, and what whoever starts them may."""

from smtrain.client.iam.policies import policies, trust_policy_of

__all__ = ["policies", "trust_policy_of"]
