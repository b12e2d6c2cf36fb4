"""A finished model goes to others: the Hugging Face hub, the SageMaker Model Registry."""
