"""Talking to AWS, or to the control plane that stands for it: sessions, calls that are repeated, S3, defaults."""
