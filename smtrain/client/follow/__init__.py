"""Follow a job: every host's lines in order and once, a live picture of it, why it failed, what it costs."""
