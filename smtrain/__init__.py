"""Continue the pre-training of an open LLM on AWS Trainium with one call.

>>> import smtrain
>>> run = smtrain.run("examples/tiny-llama.yaml", target="local")
>>> job = smtrain.launch("examples/tiny-llama.yaml", stage="train", target="local", wait=False)

Importing this costs next to nothing: each name is loaded when it is first used (PEP 562).
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would cost more than all the rest of this module
if TYPE_CHECKING:
    from smtrain.checkpoint.convert import convert
    from smtrain.comparison.compare import Comparison, compare
    from smtrain.config import JobConfig
    from smtrain.errors import CheckpointError, ConfigError, DataError, JobError, LocalError, SmtrainError
    from smtrain.handle.job import Job
    from smtrain.handover.push import push
    from smtrain.handover.register import register
    from smtrain.planner.api import plan
    from smtrain.planner.resolve import load_config
    from smtrain.planner.result import Plan
    from smtrain.preflight import Finding, Report, check
    from smtrain.reporting.api import report
    from smtrain.serving.deploy import deploy, undeploy
    from smtrain.submission.api import launch, request, run
    from smtrain.submission.estimator import estimator
    from smtrain.submission.outcome import Run
    from smtrain.submission.pipeline import pipeline
    from smtrain.talk.api import Chat, chat
    from smtrain.talk.batch import generate
    from smtrain.tuning.api import tune
    from smtrain.tuning.trials import Tuning

__version__ = "0.1.0"

_HOME = {
    "Chat": "smtrain.talk.api",
    "chat": "smtrain.talk.api",
    "generate": "smtrain.talk.batch",
    "convert": "smtrain.checkpoint.convert",
    "JobConfig": "smtrain.config",
    "load_config": "smtrain.planner.resolve",
    "SmtrainError": "smtrain.errors",
    "ConfigError": "smtrain.errors",
    "DataError": "smtrain.errors",
    "CheckpointError": "smtrain.errors",
    "JobError": "smtrain.errors",
    "LocalError": "smtrain.errors",
    "Job": "smtrain.handle.job",
    "Run": "smtrain.submission.outcome",
    "launch": "smtrain.submission.api",
    "request": "smtrain.submission.api",
    "run": "smtrain.submission.api",
    "Plan": "smtrain.planner.result",
    "plan": "smtrain.planner.api",
    "pipeline": "smtrain.submission.pipeline",
    "estimator": "smtrain.submission.estimator",
    "tune": "smtrain.tuning.api",
    "Tuning": "smtrain.tuning.trials",
    "push": "smtrain.handover.push",
    "register": "smtrain.handover.register",
    "check": "smtrain.preflight",
    "compare": "smtrain.comparison.compare",
    "Comparison": "smtrain.comparison.compare",
    "report": "smtrain.reporting.api",
    "deploy": "smtrain.serving.deploy",
    "undeploy": "smtrain.serving.deploy",
    "Finding": "smtrain.preflight",
    "Report": "smtrain.preflight",
}

__all__ = [
    "Chat",
    "CheckpointError",
    "Comparison",
    "ConfigError",
    "DataError",
    "Finding",
    "Job",
    "JobConfig",
    "JobError",
    "LocalError",
    "Plan",
    "Report",
    "Run",
    "SmtrainError",
    "Tuning",
    "chat",
    "check",
    "compare",
    "convert",
    "deploy",
    "estimator",
    "generate",
    "launch",
    "load_config",
    "pipeline",
    "plan",
    "push",
    "register",
    "report",
    "request",
    "run",
    "tune",
    "undeploy",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        from importlib import import_module

        from smtrain.extras import collector_paused, missing

        try:
            with collector_paused():
                home = import_module(_HOME[name])
            return getattr(home, name)
        except ModuleNotFoundError as error:
            from smtrain.errors import SmtrainError

            if error.name is None or error.name.startswith("smtrain"):
                raise
            raise SmtrainError(missing(error.name)) from error
    raise AttributeError(f"module 'smtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
