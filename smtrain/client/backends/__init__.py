"""Backends that run jobs: their common protocol, SageMaker, Slurm, and the choice by a config or a
job name.
"""
