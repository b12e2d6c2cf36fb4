"""From a config to jobs: requests, uploads, submission, and the stages of a run."""
