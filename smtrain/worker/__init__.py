"""The half that runs inside a job: data, checkpoints, engines, training, generation, evaluation."""
