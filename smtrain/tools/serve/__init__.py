"""A trained model that answers: by an OpenAI-compatible server on this machine, or by a SageMaker endpoint."""
