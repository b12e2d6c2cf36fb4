"""The SageMaker API, on AWS or on the local control plane: clients, retries, S3, defaults."""
