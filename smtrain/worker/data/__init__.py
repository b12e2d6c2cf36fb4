"""Text to token batches: read, clean, tokenize, pack, prepare, load. Only `load` needs torch."""
