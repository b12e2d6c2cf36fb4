"""Start runs: one launch, a series of settings, a SageMaker pipeline, and `run`, which waits for
the end.
"""
