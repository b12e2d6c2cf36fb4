"""Mutated configs and damaged inputs, by seed, for all commands that read them (`scripts/bench
fuzz`).
"""
