"""Shared by client and worker: errors, text, config, facts, model families, and the protocol of a
job.
"""
