"""Hugging Face folders, and the export stage that writes one."""
