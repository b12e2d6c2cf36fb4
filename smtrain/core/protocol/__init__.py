"""The contract between client and worker: /opt/ml, log lines, lineage of checkpoints, and their
owner.
"""
