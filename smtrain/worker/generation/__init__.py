"""Text from a Hugging Face model: sampling, conversations, streams and batches, over transformers'
generation.
"""
