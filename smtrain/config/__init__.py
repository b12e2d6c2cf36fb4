"""The one description of a job: `JobConfig`, read from YAML, keyword arguments and `--set` alike."""

from smtrain.config.load import load_config
from smtrain.config.schema import STAGES, JobConfig, Stage

__all__ = ["STAGES", "JobConfig", "Stage", "load_config"]
