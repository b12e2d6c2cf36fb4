"""`smtrain.launch` and `smtrain.run`, with all checks before them; a tracker gets the report of a
run after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

from smtrain.client.config.load import Source
from smtrain.client.jobs.job import Job
from smtrain.client.launch.stages import Chain
from smtrain.client.planner.resolve import load_config
from smtrain.client.runs.launch import launch_stage, run_list, run_stages
from smtrain.client.runs.run import Run
from smtrain.core import text
from smtrain.core.config import Stage
from smtrain.core.errors import ConfigError
from smtrain.core.interrupts import resumable_interrupt
from smtrain.core.protocol.log_lines import Line
from smtrain.core.public_api import public
from smtrain.core.targets import TargetName
from smtrain.core.text import Say

if TYPE_CHECKING:
    from smtrain.client.follow.show import View

_SAME_CALL = "interrupted: what has been started keeps running; the same call joins it again"


@resumable_interrupt(_SAME_CALL)
@public
def launch(
    source: Source | None = None,
    *,
    stage: Stage = "train",
    target: TargetName | None = None,
    wait: bool = True,
    again: bool = False,
    check: bool = True,
    set_: Sequence[str] = (),
    say: Say = text.say,
    view: View | None = None,
    **sections: Any,
) -> Job:
    """Start one stage of a config and return its job.

    Joins a running stage; returns a finished one unchanged. If AWS has no
    machines, `compute.capacity_wait` and `compute.fallback_instance_types` decide how long to wait
    and which types to try next. Ctrl-C leaves the job running.

    Args:
        source: The config: a YAML file's path, a mapping, or a `JobConfig`. None: `sections` are
            all of it.
        stage: The stage to start.
        target: the name of a target, in place of the config's `target`.
        wait: Follow the job until it ends.
        again: Do what has been done already once more.
        check: Start nothing without the requested checkpoint, nor, on AWS, with a fault of
            `smtrain.check`.
        set_: `a.b=value` texts, as `--set` takes them; the value is read as YAML. Wins over
            `source` and `sections`.
        say: Called with each line.
        view: How to follow: which lines, a panel or not.
        **sections: The config's sections as mappings, merged into what `source` says.

    Returns:
        The job, which may still run if `wait` is False or Ctrl-C was pressed (`job.known_running`).

    Raises:
        ConfigError: The config is wrong.
        JobError: The job cannot be started, or, with `wait`, does not end well; the text has the
            cause.

    Examples:
        >>> job = smtrain.launch("llama.yaml", stage="prepare", wait=False, say=lambda line: None)
        >>> job.wait().status
        'Completed'
    """
    config = load_config(source, set_=set_, target=target, **sections)
    return launch_stage(
        config,
        stage,
        target=target,
        wait=wait,
        again=again,
        precheck=_look_first if check else None,
        say=say,
        view=view,
    )


@overload
def run(
    source: Source | None = None,
    *,
    target: TargetName | None = None,
    again: bool = False,
    check: bool = True,
    set_: Sequence[str] = (),
    say: Say = text.say,
    on_line: Callable[[Line], None] | None = None,
    view: View | None = None,
    wait: bool = True,
    **sections: Any,
) -> Run: ...
@overload
def run(
    source: list[Any] | tuple[Any, ...],
    *,
    target: TargetName | None = None,
    again: bool = False,
    check: bool = True,
    set_: Sequence[str] = (),
    say: Say = text.say,
    on_line: Callable[[Line], None] | None = None,
    view: View | None = None,
    wait: bool = True,
    **sections: Any,
) -> list[Run]: ...
@resumable_interrupt(_SAME_CALL)
@public
def run(
    source: Source | list[Any] | tuple[Any, ...] | None = None,
    *,
    target: TargetName | None = None,
    again: bool = False,
    check: bool = True,
    set_: Sequence[str] = (),
    say: Say = text.say,
    on_line: Callable[[Line], None] | None = None,
    view: View | None = None,
    wait: bool = True,
    **sections: Any,
) -> Run | list[Run]:
    """Take a config through all its stages: prepare, convert, train, export, generate.

    With `compute.compile_ahead`, compile comes before train. Stages that are done are skipped, one
    that was interrupted is resumed. Ctrl-C leaves the current job running and ends the call with
    KeyboardInterrupt (in a notebook without a traceback); the same call joins that job again.

    A list of configs runs in its order, and ends with the first run that fails; a config may start
    from an earlier one by `model.path: run://NAME`. All are loaded and checked before the first one
    starts.

    Args:
        source: The config: a YAML file's path, a mapping, or a `JobConfig`; or a list of these.
            None: `sections` are all of it.
        target: the name of a target, in place of the config's `target`.
        again: Do what has been done already once more.
        check: Start nothing without the requested checkpoint, nor, on AWS, with a fault of
            `smtrain.check`.
        set_: `a.b=value` texts, as `--set` takes them; the value is read as YAML. Wins over
            `source` and `sections`.
        say: Called with each line.
        on_line: Called with each line of the log, in place of `say`.
        view: How to follow: which lines, a panel or not.
        wait: False: return once all stages are queued, which only a Slurm cluster can do; it runs
            them without the client.
        **sections: The config's sections as mappings, merged into what `source` says.

    Returns:
        The run: its stages' jobs, its losses, its model, its text. For a list of configs, the list
        of their runs.

    Raises:
        ConfigError: The config is wrong.
        JobError: A stage did not end well; the text has the cause.

    Examples:
        >>> run = smtrain.run("llama.yaml", say=lambda line: None)
        >>> [result.stage for result in run.results]
        ['prepare', 'convert', 'train', 'export', 'generate']
        >>> len(run.loss)
        6
    """
    if not wait and isinstance(source, list | tuple):
        raise ConfigError(
            "wait: a list of configs is followed to its end; leave it out",
            code="config.combination",
        )
    checks = _look_first if check else None
    if isinstance(source, list | tuple):
        return run_list(
            source,
            sections,
            target=target,
            again=again,
            precheck=checks,
            on_end=_publish,
            set_=set_,
            say=say,
            on_line=on_line,
            view=view,
        )
    config = load_config(source, set_=set_, target=target, **sections)
    return run_stages(
        config,
        target=target,
        again=again,
        precheck=checks,
        on_end=_publish,
        say=say,
        on_line=on_line,
        view=view,
        wait=wait,
    )


def _look_first(chain: Chain, stages: Sequence[Stage], say: Say) -> None:
    from smtrain.tools.check import look_first  # imported late: each check is a module

    look_first(chain, stages, say)


def _publish(chain: Chain, say: Say) -> None:
    from smtrain.tools.report.publish import publish

    publish(chain.config.name, chain.target, chain.config.track, say)
