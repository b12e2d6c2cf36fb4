"""The Slurm backend: a stage as one sbatch script, and jobs described from the files that they
write.
"""
