"""Documents and records out of files, archives, S3 and the Hugging Face hub."""
