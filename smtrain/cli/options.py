"""Arguments and options that several commands share."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from smtrain.cli.dispatch import register_flags
from smtrain.cli.help import Helped, HelpedGroup
from smtrain.core.model.hf_folder import folder_of as folder_with
from smtrain.core.protocol.requests import is_of_run
from smtrain.core.protocol.uris import RUN
from smtrain.core.targets import TARGETS, TargetName, TargetRecord
from smtrain.core.text import say

if TYPE_CHECKING:
    from smtrain.client.follow.show import View
    from smtrain.client.jobs.job import Job
    from smtrain.core.config import JobConfig, Stage

Command = TypeVar("Command", bound=Callable[..., Any])

NARROW = 54
"""Below this many columns click would print help for a wider terminal."""


if TYPE_CHECKING:

    class TargetOption(str, Enum):
        """The targets of jobs."""

        local = "local"

    class StageOption(str, Enum):
        """The stages of a run."""

        train = "train"

else:
    TargetOption = Enum("TargetOption", {name: name for name in TARGETS}, type=str)


def __getattr__(name: str) -> object:
    """`StageOption`, made of smtrain.stages when a command with that option is loaded: it brings
    pydantic.
    """
    if name != "StageOption":
        raise AttributeError(name)
    from smtrain.stages import STAGES

    globals()[name] = Enum(name, {stage: stage for stage in STAGES}, type=str)
    return globals()[name]


Config = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file.", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override one key, e.g. train.lr=2e-4; repeatable."
    ),
]
TargetOverride = Annotated[
    TargetOption | None, typer.Option("--target", help="Overrides the config's target.")
]
NoCheck = Annotated[
    bool, typer.Option("--no-check", help="Skip the checks before starting (on AWS).")
]
JobTarget = Annotated[
    TargetOption, typer.Option("--target", envvar="SMTRAIN_TARGET", help="The job's target.")
]
KnownJobTarget = Annotated[
    TargetOption | None,
    typer.Option("--target", help="The job's target; default: here if it is known here, else AWS."),
]
Plain = Annotated[
    bool, typer.Option("--plain", help="Print lines and summaries instead of the live panel.")
]
SummaryInterval = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Time between summaries without the panel, e.g. 30s."),
]
JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Name of a job, or of a run: its job that runs, or its newest.",
        show_default=False,
    ),
]
FromStep = Annotated[
    int | None,
    typer.Option(metavar="N", help="Continue from this step's checkpoint, and abandon later ones."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be sent; send nothing.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace other files of the same names.")
]
ServingRole = Annotated[
    str | None,
    typer.Option("--role", metavar="ROLE", help="The container's role; default: that of the run."),
]
ServingImage = Annotated[
    str | None,
    typer.Option("--image", metavar="URI", help="Container image; default: the newest known vLLM."),
]
RunAgain = Annotated[bool, typer.Option("--again", help="Run finished stages again.")]


Docker = Annotated[
    bool, typer.Option("--docker", help="Local jobs run in containers of the image (local.run_in).")
]


@dataclass(frozen=True)
class ConfigOptions:
    """A config, the target, and single keys set on the command line."""

    config: Config
    target: TargetOverride = None
    set_: Set = None

    @property
    def target_name(self) -> TargetName | None:
        return name_of(self.target)

    def load(self) -> JobConfig:
        """The checked config, tagged with the git commit of its folder."""
        from smtrain.client.planner.resolve import load_config
        from smtrain.client.runs.launch import with_commit_tag

        return with_commit_tag(load_config(self.config, set_=self.keys(), target=self.target_name))

    def keys(self) -> list[str]:
        """KEY=VALUE of every key that the command line sets."""
        return list(self.set_ or ())

    def target_with(self, product: str, has: Callable[[TargetRecord], bool]) -> TargetRecord:
        """The target of the jobs. Raises `ConfigError` if it does not have `product`, before the
        keys of the target are asked for.

        SMTRAIN_TARGET=local asks for what AWS would need of such jobs, in the local control plane's
        account.
        """
        import os

        from smtrain.client.planner.resolve import load_config
        from smtrain.core.errors import ConfigError

        target = self.target_name or os.environ.get("SMTRAIN_TARGET", "")
        if target in TARGETS and TARGETS[target].sagemaker:
            return TARGETS[target]
        if target not in TARGETS:
            target = load_config(self.config, set_=self.keys()).target
        record = TARGETS[target]
        if not has(record):
            place = "here" if record.here else "there"
            raise ConfigError(
                f"target: is {target}, and jobs {place} need no {product}; add --target aws, or set"
                " target: aws",
                code="config.combination",
            )
        return record


@dataclass(frozen=True)
class StartOptions(ConfigOptions):
    """Options of commands that start stages of a config."""

    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the requests (on Slurm: the scripts).")
    ] = False
    upload: Annotated[
        bool,
        typer.Option(
            "--upload",
            help=(
                "With a dry run: upload code and inputs, so that what is printed can be sent by"
                " hand."
            ),
        ),
    ] = False
    show_uploads: Annotated[
        bool,
        typer.Option(
            "--show-uploads", help="List the files that would be uploaded, and send nothing."
        ),
    ] = False
    again: RunAgain = False
    from_step: FromStep = None
    docker: Docker = False
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Start without asking, whatever it costs.")
    ] = False
    no_check: NoCheck = False
    plain: Plain = False
    every: SummaryInterval = None

    @property
    def dry(self) -> bool:
        """True if nothing is started."""
        return self.dry_run or self.show_uploads

    @property
    def view(self) -> View:
        """The view of the running jobs."""
        from smtrain.client.follow.show import View

        return View(
            panel=False if self.plain else None, interval_s=seconds_of("--every", self.every)
        )

    def load(self) -> JobConfig:
        """The checked config. Raises `ConfigError` for options that exclude each other."""
        return self.validate(super().load())

    def validate(self, config: JobConfig) -> JobConfig:
        """The config.

        Raises `ConfigError` for options that exclude each other, or that it does not go with.
        """
        from smtrain.core.errors import ConfigError

        if self.upload and not self.dry_run:
            raise ConfigError(
                "--upload goes with --dry-run; without it leave it out, as everything is uploaded",
                code="config.combination",
            )
        if (
            self.docker and TARGETS[self.target_name or config.target].rented
        ):  # every host is a container there
            raise ConfigError(
                "--docker is for jobs on this machine; on AWS leave it out",
                code="config.combination",
            )
        return config

    def with_plan(self, config: JobConfig) -> JobConfig:
        """The config with its plan among the tags, after the user has agreed to its price."""
        from smtrain.cli.price_check import confirm_plan

        return confirm_plan(
            config,
            self.target_name,
            ask=not (self.yes or self.dry),
            show=not self.dry,
            warn=self.dry_run,
        )

    def keys(self) -> list[str]:
        return keys_of(self.set_, self.from_step, self.docker)

    def show_dry(self, config: JobConfig, stages: Sequence[Stage]) -> None:
        """Print what would be uploaded, or the requests; upload their inputs if asked to."""
        from smtrain.client.backends.choose import backend_of
        from smtrain.client.launch import submit
        from smtrain.client.launch.image_pattern import is_pattern
        from smtrain.client.launch.inputs import described_uploads
        from smtrain.client.launch.stages import Chain

        chain = Chain(config, backend_of(config, self.target_name), look=False)
        if chain.target.record.rented and is_pattern(config.compute.image):
            say(
                f"compute.image: {config.compute.image} is a pattern; a launch first asks the"
                " registry for the newest tag that matches, as `smtrain check` does",
                error=True,
            )
        plans = [chain.plan(stage) for stage in stages]
        if self.show_uploads:
            for line in described_uploads([upload for plan in plans for upload in plan.uploads]):
                say(line)
            return
        for plan in plans if self.upload else ():
            submit.upload(chain, plan, partial(say, error=True))
        say(chain.target.preview([plan.request for plan in plans]), raw=True)


@dataclass(frozen=True)
class ServiceOptions:
    """Services that a config is used with, whose permissions are checked or granted too."""

    tune: Annotated[bool, typer.Option("--tune", help="Also for `smtrain tune`.")] = False
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", metavar="NAME", help="Also for an endpoint of this name."),
    ] = None
    group: Annotated[
        str | None,
        typer.Option("--group", metavar="NAME", help="Also to register versions in this group."),
    ] = None
    pipeline: Annotated[
        str | None,
        typer.Option("--pipeline", metavar="NAME", help="Also for a pipeline of this name."),
    ] = None


def keys_of(
    set_: list[str] | None, from_step: int | None = None, docker: bool = False
) -> list[str]:
    """KEY=VALUE of every key that options of a command set, as for --set."""
    if docker:
        register_flags({"local.run_in": "--docker"})
    if from_step is not None:
        register_flags({"checkpoint.step": "--from-step"})
    return [
        *(set_ or ()),
        *([] if from_step is None else [f"checkpoint.step={from_step}"]),
        *(["local.run_in=docker"] if docker else []),
    ]


def name_of(target: TargetOption | None) -> TargetName | None:
    """The option as the library's `TargetName`."""
    return None if target is None else target.value


def job_named(name: str, target: TargetOption | None, stages: tuple[str, ...] = ()) -> Job:
    """The job of a name; for a run's name, `job_of` chooses the job, which is then printed."""
    from smtrain.client.jobs.listing import job_of

    job = job_of(name, name_of(target), stages)
    if is_of_run(job.name, name):
        say(f"run {name}: job {job.name}", error=True)
    return job


def seconds_of(option: str, text: str | None) -> float | None:
    """A duration option in seconds; raises `JobError` for an invalid one."""
    if text is None:
        return None
    from smtrain.core.config.units import seconds
    from smtrain.core.errors import JobError

    try:
        return float(seconds(text))
    except ValueError as error:
        raise JobError(f"{option} {text}: {error}") from None


FinishedJobs = Annotated[
    bool,
    typer.Option(
        "--jobs", help="Remove jobs of finished runs and what only they use; exported models stay."
    ),
]
OlderThan = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="Only jobs that ended at least so long ago, e.g. 7d; implies --jobs."
    ),
]
OneRun = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Remove this one run, finished or not, with its checkpoints and models.",
    ),
]
WithoutAsking = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def age_of(text: str | None) -> float | None:
    """`--older-than` in seconds; raises `ConfigError` for an invalid one."""
    from smtrain.core.config.units import seconds
    from smtrain.core.errors import ConfigError

    try:
        return None if text is None else float(seconds(text))
    except ValueError as error:
        raise ConfigError(f"--older-than: {error}", code="config.wrong_value") from None


def is_named(*selections: object) -> bool:
    """True if an option of `clean` names something to remove; otherwise print those options."""
    if any(selection is not None and selection is not False for selection in selections):
        return True
    say("give --jobs, --older-than TIME, --run NAME or --all to remove something")
    return False


def may_remove(yes: bool) -> bool:
    """True if the user agrees to the removal.

    Raises `LocalError` if there is no terminal to ask on.
    """

    from smtrain.core.errors import LocalError

    if yes:
        return True
    if not sys.stdin.isatty():
        raise LocalError(
            "nothing was removed, as there is no terminal to ask on; confirm with --yes"
        )
    if typer.confirm("Remove it?"):
        return True
    say("nothing was removed")
    return False


def say_kept(reason_by_run: dict[str, str]) -> None:
    """Say which runs stay, and why."""
    from smtrain.core.protocol.removable_jobs import NOT_ASKED

    for name, reason in reason_by_run.items():
        if reason != NOT_ASKED:
            say(f"stays: {name} ({reason})")


def folder_of(option: str, text: str | None) -> str | None:
    """An output folder as it was typed.

    Raises `JobError` for an empty name, for a file, and for a place that may not be written: the
    command's work would be lost at its end.
    """
    import os

    from smtrain.core.errors import JobError

    if text is None or "://" in text:
        return text
    if not text.strip():
        raise JobError(f"{option} is an empty name; name a folder (`.` is the working directory)")
    parent = os.path.abspath(text)
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if os.path.isfile(parent):
        file = text if os.path.isfile(text) else parent
        raise JobError(f"{option}: {file} is a file; name a folder")
    if not os.access(parent, os.W_OK):
        raise JobError(f"{option}: {parent} is read-only: make it writable, or name another folder")
    return text


class App(typer.Typer):
    """A typer app whose commands have the help of `cli.help` and may take classes of options."""

    def command(
        self,
        name: str | None = None,
        *,
        groups: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Callable[[Command], Command]:
        """As typer's. A dataclass parameter becomes an option for each of its fields.

        `groups` are the headings of the options in the help, each with its options as words.
        """
        add = super().command(
            name, cls=type("Helped", (Helped,), {"groups": groups or {}}), **settings
        )

        def register(function: Command) -> Command:
            add(_flat(function))
            return function

        return register


def _flat(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with the fields of its dataclasses as parameters, which is what typer reads."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    if not groups:
        return command
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        group = groups.get(parameter.name)
        types = hints if group is None else get_type_hints(group, include_extras=True)
        parts = (
            [(parameter.name, parameter.default)]
            if group is None
            else [(f.name, f.default) for f in fields(group)]
        )
        for name, default in parts:
            default = Parameter.empty if default is MISSING else default
            parameters.append(
                Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
            )

    def call(**values: Any) -> Any:
        group_values = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})  # type: ignore[operator]
            for name, group in groups.items()
        }
        return command(**group_values, **values)

    call.__name__, call.__doc__, call.__module__ = (
        command.__name__,
        command.__doc__,
        command.__module__,
    )
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return call


def app(description: str = "") -> App:
    """A command's typer app: plain errors, no shell-completion options on every command.

    `description` is the help of a command that has subcommands, with its examples.
    """
    columns = shutil.get_terminal_size().columns
    settings = {"terminal_width": max(20, columns - 2)} if columns < NARROW else {}
    if settings:
        _narrow_help()
    help_setting: dict[str, Any] = (
        {"help": description} if description else {}
    )  # without it a group's callback says it
    return App(
        cls=HelpedGroup,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings=settings,
        **help_setting,
    )


def _narrow_help() -> None:
    """Leave the options' own column a third of a narrow terminal; click would take 30 places of
    it.
    """
    from typer.core import TyperCommand

    context: Any = TyperCommand.context_class
    formatter: Any = context.formatter_class
    if formatter.__name__ == "Narrow":  # a command whose app is made after another's
        return

    class Narrow(formatter):  # type: ignore[misc]
        def write_dl(self, rows: Any, col_max: int = 30, col_spacing: int = 2) -> None:
            super().write_dl(rows, min(col_max, self.width // 3), col_spacing)

    context.formatter_class = Narrow


def resolve_folder(model: str) -> str:
    """The folder of a demo:// model or text, which is made if needed, or of the model of
    run://NAME, which is fetched; anything else unchanged.

    Every command resolves names with this or with `tools.chat.resolve_model.find`.
    """
    if model.startswith(RUN):
        from smtrain.tools.chat.resolve_model import find

        return str(find(model).fetch(partial(say, error=True)))
    if not model.startswith("demo://"):
        return model
    from smtrain.core.demo import materialise

    return str(materialise(model))


def model_folder(model: str) -> str:
    """The folder of a model, given as a folder, one of its files, or a demo:// URI."""
    from smtrain.core.errors import CheckpointError
    from smtrain.core.protocol.uris import not_here

    if hint_uri := not_here(model):
        raise CheckpointError(hint_uri)
    return folder_with(resolve_folder(model))
