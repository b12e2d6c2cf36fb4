"""Test instruments outside the wheel: jobs of known log lines, and a clock that runs ahead."""
