"""Steps on their way to MLflow and Weights & Biases: buffered, each once, and never in the way of a training."""
