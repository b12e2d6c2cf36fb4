"""`smtrain.pipeline`, with all checks before a pipeline is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smtrain.client.config.load import Source
from smtrain.client.planner.resolve import load_config
from smtrain.client.runs.pipeline import make_pipeline
from smtrain.core import text
from smtrain.core.public_api import public
from smtrain.core.targets import TargetName
from smtrain.core.text import Say
from smtrain.tools.check import look_first


@public
def pipeline(
    source: Source | None = None,
    *,
    name: str | None = None,
    upsert: bool = False,
    start: bool = False,
    check: bool = True,
    target: TargetName | None = None,
    set_: Sequence[str] = (),
    say: Say = text.say,
    **sections: Any,
) -> dict[str, Any]:
    """The stages of a config as the definition of a SageMaker pipeline.

    Without `upsert` and `start` nothing is sent. A step whose arguments are those of an execution
    in the last 30 days is not done again. With `compute.capacity_wait` a step waits so long for
    machines.

    Args:
        source: The config: a YAML file's path, a mapping, or a `JobConfig`. None: `sections` are
            all of it.
        name: The pipeline's name. Default: the config's.
        upsert: Upload what the stages read, and create the pipeline or update it.
        start: Do that, and start an execution.
        check: On AWS, look first at everything that `smtrain.check` looks at, and send nothing if
            there is a fault.
        target: `local` or `aws`, in place of the config's `target`. Locally a pipeline is a record
            that never runs.
        set_: `a.b=value` texts, as `--set` takes them; the value is read as YAML. Wins over
            `source` and `sections`.
        say: Called with each line.
        **sections: The config's sections as mappings, merged into what `source` says.

    Returns:
        The definition, as `json.dumps` and `create_pipeline` take it.

    Raises:
        ConfigError: The config is wrong, or the target has no pipelines.
        JobError: Account, region or role cannot be told, or AWS refuses.

    Examples:
        >>> made = smtrain.pipeline("llama.yaml")
        >>> [step["Name"] for step in made["Steps"]]
        ['prepare', 'convert', 'train', 'export', 'generate']
    """
    config = load_config(source, set_=set_, target=target, **sections)
    return make_pipeline(
        config,
        name=name,
        upsert=upsert,
        start=start,
        precheck=look_first if check else None,
        target=target,
        say=say,
    )
