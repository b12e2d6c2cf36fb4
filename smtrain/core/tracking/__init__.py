"""Send steps to MLflow and Weights & Biases: buffered, each step once, without ever blocking a
training.
"""
