"""What both halves use: errors, text, config, facts, model families, and the protocol of a job."""
