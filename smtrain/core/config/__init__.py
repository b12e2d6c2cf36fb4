"""`JobConfig`, the description of a job; `client.planner.resolve.load_config` makes one."""

from smtrain.core.config.schema import JobConfig, Stage

__all__ = ["JobConfig", "Stage"]
