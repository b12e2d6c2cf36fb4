"""What decides about whole documents, one by one: quality filters, personal data, signatures for near duplicates."""
