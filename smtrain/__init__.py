"""Continue the pre-training of an open LLM on AWS Trainium with one call.

>>> import smtrain
>>> run = smtrain.run("examples/tiny-llama.yaml", target="local")
>>> job = smtrain.launch("examples/tiny-llama.yaml", stage="train", target="local", wait=False)

Importing this costs next to nothing: each name is loaded when it is first used (PEP 562).
"""

from __future__ import annotations

from smtrain.version import __version__ as __version__

TYPE_CHECKING = False  # importing typing would cost more than all the rest of this module
if TYPE_CHECKING:
    from smtrain.client.jobs.job import Job
    from smtrain.client.launch.estimator import estimator
    from smtrain.client.planner.plan import plan
    from smtrain.client.planner.resolve import load_config
    from smtrain.client.planner.result import Plan
    from smtrain.client.preflight import Finding, Report
    from smtrain.client.runs.launch import request
    from smtrain.client.runs.run import Run
    from smtrain.core.config import JobConfig
    from smtrain.core.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        JobError,
        LocalError,
        SmtrainError,
    )
    from smtrain.tools.chat.chat import chat
    from smtrain.tools.chat.conversation import Chat
    from smtrain.tools.chat.generate import generate
    from smtrain.tools.check import check
    from smtrain.tools.compare.compare import Comparison, compare
    from smtrain.tools.convert import convert
    from smtrain.tools.pipeline import pipeline
    from smtrain.tools.publish.push import push
    from smtrain.tools.publish.register import register
    from smtrain.tools.report.report import report
    from smtrain.tools.run import launch, run
    from smtrain.tools.serve.deploy import deploy, undeploy
    from smtrain.tools.tune.trials import Tuning
    from smtrain.tools.tune.tune import tune
    from smtrain.worker.checkpoint.convert import ReadOptions
    from smtrain.worker.checkpoint.targets import (
        Dcp,
        HuggingFace,
        Megatron,
        Native,
        NemoMegatron,
        Nxd,
        Peft,
    )


_HOME = {
    "Chat": "smtrain.tools.chat.conversation",
    "chat": "smtrain.tools.chat.chat",
    "generate": "smtrain.tools.chat.generate",
    "convert": "smtrain.tools.convert",
    "ReadOptions": "smtrain.worker.checkpoint.convert",
    "HuggingFace": "smtrain.worker.checkpoint.targets",
    "Nxd": "smtrain.worker.checkpoint.targets",
    "Native": "smtrain.worker.checkpoint.targets",
    "Megatron": "smtrain.worker.checkpoint.targets",
    "NemoMegatron": "smtrain.worker.checkpoint.targets",
    "Dcp": "smtrain.worker.checkpoint.targets",
    "Peft": "smtrain.worker.checkpoint.targets",
    "JobConfig": "smtrain.core.config",
    "load_config": "smtrain.client.planner.resolve",
    "SmtrainError": "smtrain.core.errors",
    "ConfigError": "smtrain.core.errors",
    "DataError": "smtrain.core.errors",
    "CheckpointError": "smtrain.core.errors",
    "JobError": "smtrain.core.errors",
    "LocalError": "smtrain.core.errors",
    "Job": "smtrain.client.jobs.job",
    "Run": "smtrain.client.runs.run",
    "launch": "smtrain.tools.run",
    "request": "smtrain.client.runs.launch",
    "run": "smtrain.tools.run",
    "Plan": "smtrain.client.planner.result",
    "plan": "smtrain.client.planner.plan",
    "pipeline": "smtrain.tools.pipeline",
    "estimator": "smtrain.client.launch.estimator",
    "tune": "smtrain.tools.tune.tune",
    "Tuning": "smtrain.tools.tune.trials",
    "push": "smtrain.tools.publish.push",
    "register": "smtrain.tools.publish.register",
    "check": "smtrain.tools.check",
    "compare": "smtrain.tools.compare.compare",
    "Comparison": "smtrain.tools.compare.compare",
    "report": "smtrain.tools.report.report",
    "deploy": "smtrain.tools.serve.deploy",
    "undeploy": "smtrain.tools.serve.deploy",
    "Finding": "smtrain.client.preflight",
    "Report": "smtrain.client.preflight",
}

__all__ = [
    "Chat",
    "CheckpointError",
    "Comparison",
    "ConfigError",
    "DataError",
    "Dcp",
    "Finding",
    "HuggingFace",
    "Job",
    "JobConfig",
    "JobError",
    "LocalError",
    "Megatron",
    "Native",
    "NemoMegatron",
    "Nxd",
    "Peft",
    "Plan",
    "ReadOptions",
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
        import sys

        loaded = getattr(sys.modules.get(_HOME[name]), name, None)
        if loaded is not None:
            return loaded
        from importlib import import_module

        from smtrain.core.extras import missing_module, pause_collector

        try:
            with pause_collector():
                home = import_module(_HOME[name])
            return getattr(home, name)
        except ModuleNotFoundError as error:
            from smtrain.core.errors import SmtrainError

            if error.name is None or error.name.startswith("smtrain"):
                raise
            raise SmtrainError(missing_module(error.name)) from error
    raise AttributeError(f"module 'smtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
