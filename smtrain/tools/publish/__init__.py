"""Publish a model: on the Hugging Face hub, in the SageMaker Model Registry."""
