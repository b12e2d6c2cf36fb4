"""The one description of a job, `JobConfig`; `client.planner.resolve.load_config` makes one from YAML, arguments and
--set."""

from smtrain.core.config.schema import JobConfig, Stage

__all__ = ["JobConfig", "Stage"]
