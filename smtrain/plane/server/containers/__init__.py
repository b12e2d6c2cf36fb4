"""Hosts that are containers: Docker or podman runs the request's image, with SageMaker's
contract.
"""
