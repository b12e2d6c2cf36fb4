"""The git commit of the folder that a run was started from, as a tag of its jobs.

A tag, since it changes neither what a job does nor its name; the command line adds it, so that a request remains a
function of config and bundle alone.
"""

from __future__ import annotations

from pathlib import Path

from smtrain.client.planner.resolve import with_tags
from smtrain.core.config import JobConfig
from smtrain.core.git import TAG, committed


def tagged(config: JobConfig, folder: Path | None = None) -> JobConfig:
    """The config with the commit among the tags of its jobs; as it is where there is none, or it has such a tag."""
    if TAG in config.tags or (found := committed(folder)) is None:
        return config
    return with_tags(config, **{TAG: found})
