"""Compare trainings: curves of runs, jobs and other tools' logs, side by side."""
