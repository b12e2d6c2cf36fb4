"""Images of jobs: build, verify, pull and push."""
