"""Hosts that are containers: Docker (or what speaks its API) runs the request's image, with SageMaker's contract."""
