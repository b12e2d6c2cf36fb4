"""Serve a trained model: with an OpenAI-compatible server on this machine, or a SageMaker
endpoint.
"""
