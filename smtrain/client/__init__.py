"""The half that runs at the user's: plans, requests, backends, jobs, checks, permissions."""
