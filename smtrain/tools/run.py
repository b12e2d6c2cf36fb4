"""`smtrain.run`: all stages of a config; a tracker then gets the report of the run."""

from __future__ import annotations

from smtrain.client.launch.stages import Chain
from smtrain.client.runs import launch
from smtrain.client.runs.launch import run as run
from smtrain.core.text import Say


def _publish(chain: Chain, say: Say) -> None:
    from smtrain.tools.report.publish import publish

    publish(chain.config.name, chain.target, chain.config.track, say)


launch.AFTER_RUN.append(_publish)
