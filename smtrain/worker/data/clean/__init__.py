"""Filters over documents: quality, duplicates, personal data, overlap with tests."""
