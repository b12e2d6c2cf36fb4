"""The one description of a job, `JobConfig`; `planner.resolve.load_config` makes one from YAML, arguments and --set."""

from smtrain.config.schema import STAGES, JobConfig, Stage

__all__ = ["STAGES", "JobConfig", "Stage"]
