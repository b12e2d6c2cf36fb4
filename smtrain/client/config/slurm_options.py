"""Parse the options of sbatch and srun in a config, and refuse those that a stage cannot run
with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

# Short options without a value: `-kW` is two options, `-kN2` is -k and -N with its value.
_FLAGS = {"sbatch": "hHIkOQsvVW", "srun": "EhHklOQsuvVXZ"}
_LETTERS = {
    "a": "array",
    "A": "account",
    "C": "constraint",
    "e": "error",
    "h": "help",
    "i": "input",
    "I": "immediate",
    "J": "job-name",
    "K": "kill-on-bad-exit",
    "M": "clusters",
    "n": "ntasks",
    "N": "nodes",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "t": "time",
    "V": "version",
    "W": "wait",
    "Z": "no-allocate",
    "r": "relative",
}
_NAME = re.compile(r"--(\w[\w-]*)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def _use_key(key: str) -> str:
    return f"another key says this; set {key}"


_ONE_TASK = "a stage is one task on each node; compute.instance_count says how many nodes"
_ONE_JOB = "a stage is one Slurm job; leave it out"
_NOTHING_RUNS = "no job would run; leave it out"
_WORDS = "status and logs read Slurm's words in the job's folder; leave it out"
_FOUND_BY_NAME = "the job is found by its name; leave it out"
_ENDS_TOGETHER = "the other nodes must end when one has failed; leave it out"
_SHARED_OPTIONS = {
    "array": _ONE_JOB,
    "clusters": (
        "a job is looked for on its head node's own cluster; name the other cluster's in"
        " cluster.host"
    ),
    "job-name": _FOUND_BY_NAME,
    "output": _WORDS,
    "error": _WORDS,
    **{
        name: _use_key(f"cluster.{name}")
        for name in ("account", "constraint", "container", "partition", "qos")
    },
    **{name: _use_key(f"cluster.{name}") for name in ("reservation", "time")},
    "nodes": _use_key("compute.instance_count"),
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu"),
        _ONE_TASK,
    ),
    **dict.fromkeys(("help", "usage", "version", "test-only"), _NOTHING_RUNS),
}
_REFUSED_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "sbatch": {
        **_SHARED_OPTIONS,
        "open-mode": _WORDS,
        "signal": _use_key("cluster.save_before"),
        "no-requeue": "a job requeues itself after its time limit and a lost node; leave it out",
        "wait": "sbatch would not return before the job's end; leave it out, and run with --wait",
        "wrap": "the script of the stage is what runs; put lines of yours into cluster.setup",
        "get-user-env": (
            "it loads all of the login shell, secrets too; name what is needed, as in --export=NAME"
        ),
        "export-file": (
            "variables of a file cannot be checked for secrets; write them in compute.environment"
        ),
    },
    "srun": {
        **_SHARED_OPTIONS,
        "export": (
            "the stage needs all that its script exports; name variables in cluster.sbatch, as in"
            " --export=NAME"
        ),
        "wait": _ENDS_TOGETHER,
        "kill-on-bad-exit": _ENDS_TOGETHER,
        "jobid": _ONE_JOB,
        "multi-prog": _ONE_TASK,
        "pty": "there is no terminal; leave it out",
        "no-allocate": _NOTHING_RUNS,
        "relative": _ONE_TASK,
        "bcast": "the stage is no program file; leave it out",
    },
}


def options_of(words: Iterable[str]) -> tuple[str, ...]:
    """Each option with its value as one argument: `--a b` in one item or two is `--a=b`, `-a b` is
    `-ab`.
    """
    options: list[str] = []
    for word in words:
        if not word.startswith("-") and options and "=" not in options[-1]:
            options[-1] += ("=" if options[-1].startswith("--") else "") + word
            continue
        name, space, value = word.partition(" ")
        if space and word.startswith("-") and "=" not in name:
            word = f"{name}{'=' if name.startswith('--') else ''}{value.strip()}"
        options.append(word)
    return tuple(options)


def option_faults(words: Iterable[str], program: str) -> Iterator[str]:
    """Options that sbatch or srun cannot take from a script, or that would break the stage."""
    for option in options_of(words):
        option_text = option if len(option) <= 60 else f"{option[:57]}..."
        if _CONTROL.search(option):
            yield (
                f"{option_text!r} holds a line break or another control character; write its value"
                " in one line"
            )
        elif not re.match(r"--\w|-\w", option):
            yield (
                f"{option_text!r} is not an option of {program}; write option and value as one"
                " item, as in --comment=text"
            )
        else:
            yield from (
                f"{option_text}: {reason}"
                for reason in dict.fromkeys(_break_reasons(option, program))
            )


def _break_reasons(option: str, program: str) -> Iterator[str]:
    """Reasons why an option would break the stage."""
    reasons = _REFUSED_OPTIONS[program]
    for name in _names(option, program):
        matches = [full for full in reasons if full == name] or [
            full for full in reasons if full.startswith(name)
        ]
        if matches and not (program == "sbatch" and name == "export"):
            yield reasons[matches[0]]
    if program == "sbatch":
        yield from Exported.of([option]).faults


def _names(option: str, program: str) -> list[str]:
    """Long names of the options in one argument."""
    if long := _NAME.match(option):
        return [long[1]]
    names = []
    for letter in option[1:]:
        names.append(_LETTERS.get(letter, letter * 2))
        if letter not in _FLAGS[program]:
            break
    return names


@dataclass(frozen=True)
class Exported:
    """The variables that `--export` in cluster.sbatch adds to the environment of a job."""

    all_variables: bool = False
    """ALL: the whole environment of the shell that submits."""
    names: tuple[str, ...] = ()
    """Variables of the shell that submits."""
    values: tuple[tuple[str, str], ...] = ()
    """Variables with a value: NAME=value."""
    faults: tuple[str, ...] = ()

    @classmethod
    def of(cls, words: Iterable[str]) -> Exported:
        """Parse the options of sbatch; NONE and NIL add nothing."""
        all_variables, names, values, faults = (
            False,
            list[str](),
            list[tuple[str, str]](),
            list[str](),
        )
        for option in options_of(words):
            if not is_export(option):
                continue
            exported_names = option.partition("=")[2]
            if not exported_names:
                faults.append("names no variable; write --export=NAME, or leave it out")
            for part in filter(None, exported_names.split(",")):
                name, equals, value = part.partition("=")
                if part.upper() == "ALL":
                    all_variables = True
                elif part.upper() in ("NONE", "NIL"):
                    continue
                elif not _VARIABLE.fullmatch(name) or set(value) & set("'\""):
                    faults.append(
                        f"{part!r} is not NAME or NAME=value; write the variable in"
                        " compute.environment"
                    )
                elif equals:
                    values.append((name, value))
                else:
                    names.append(name)
        return cls(all_variables, tuple(names), tuple(values), tuple(faults))


def is_export(option: str) -> bool:
    """True for `--export=...`."""
    return option == "--export" or option.startswith("--export=")
