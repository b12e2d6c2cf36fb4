"""A Slurm cluster on AWS: its network, and its file for AWS ParallelCluster."""
