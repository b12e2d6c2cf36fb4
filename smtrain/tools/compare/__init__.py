"""Whether two trainings learn alike: curves of runs, jobs and other tools' logs, side by side."""
