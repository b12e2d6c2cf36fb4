"""`smtrain doctor`: look at this machine, train on it if asked; the report as text, as JSON and as
one HTML page.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smtrain.client.findings import Finding, Report
from smtrain.client.planner.machines import GIB
from smtrain.core.doing import spinner
from smtrain.core.errors import ConfigError
from smtrain.core.files import probe, write_atomically
from smtrain.core.pages.charts import chart
from smtrain.core.pages.page import Cell, number, render
from smtrain.core.text import align_columns
from smtrain.tools.doctor import verdicts
from smtrain.tools.doctor.devices import TorchView, devices
from smtrain.tools.doctor.gathered import Gathered
from smtrain.tools.doctor.software import disks, processor, software
from smtrain.tools.doctor.training import ALL, Outcome, Trials, train
from smtrain.version import __version__

MADE_BY = "smtrain doctor"
FORMAT = 1
"""Version of the JSON, which docs/doctor.md describes."""
_OURS = re.compile(rf'(content=|"made_by": )"{MADE_BY}"'.encode())
_ENDINGS = {"--json": ".json", "--page": ".html"}
_TONES = {"ok": "good", "warning": "warn", "fault": "bad"}


@dataclass(frozen=True)
class Diagnosis:
    """All that was found about a machine."""

    gathered: Gathered
    view: TorchView
    trained: Trials | None = None
    """The training; None without --train, and if the machine cannot train."""

    @property
    def report(self) -> Report:
        """The findings about the machine and its training."""
        found = list(self.gathered.findings)
        return Report(
            tuple(found + (verdicts.findings(self.trained, self.view) if self.trained else []))
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as docs/doctor.md describes them."""
        report = self.report
        training = (
            None if self.trained is None else {**self.trained.to_dict(), "figures": self._figures()}
        )
        return {
            "made_by": MADE_BY,
            "format": FORMAT,
            "smtrain": __version__,
            **report.to_dict(),
            "machine": self.gathered.facts,
            "training": training,
        }

    def __str__(self) -> str:
        rows = [
            [section if k == 0 else "", name, _shown(value)]
            for section, facts in self.gathered.facts.items()
            for k, (name, value) in enumerate(facts.items())
        ]
        parts = (
            [] if self.trained is None else [*align_columns(self._parts()), *self.trained.notes, ""]
        )
        return "\n".join([*align_columns(rows), "", *parts, str(self.report)])

    def _parts(self) -> list[list[str]]:
        assert self.trained is not None
        return [
            ["part", "device", "processes", "state", "seconds"],
            *(
                [
                    one.part.replace("_", " "),
                    one.device,
                    str(one.processes),
                    one.state,
                    f"{one.seconds:.1f}",
                ]
                for one in self.trained.outcomes
            ),
        ]

    def _figures(self) -> dict[str, Any]:
        """The figures of speed and memory by group, with the planner's predictions."""
        trained, figures = self.trained, dict[str, Any]()
        for group in dict.fromkeys((trained.first, ALL)) if trained else ():
            assert trained is not None
            done, said = (
                trained.done(group, "speed"),
                verdicts.prediction(trained, self.view, group),
            )
            if done is None or said is None:
                continue
            plain, processes = (
                trained.done(group, "plain_speed"),
                (trained.count if group == ALL else 1),
            )
            figures[group] = {
                "processes": processes,
                "tokens_per_s": done["tokens_per_s"],
                "plain_tokens_per_s": plain["tokens_per_s"] if plain else None,
                "mfu": verdicts.mfu(trained, done, said, processes),
                "predicted": asdict(said),
                "peak_bytes": done["peak_bytes"],
                "plain_peak_bytes": plain["peak_bytes"] if plain else None,
            }
        return figures

    def page(self) -> str:
        """One HTML document that fetches nothing."""
        trained, report = self.trained, self.report
        return render(
            "doctor.html",
            hide_secrets=True,
            title="smtrain doctor",
            generator=MADE_BY,
            version=__version__,
            now=datetime.datetime.now(datetime.timezone.utc),
            ok=report.ok,
            findings=[
                _finding(one)
                for level in list(_TONES)[::-1]
                for one in report
                if one.level == level
            ],
            figures=[_row(group, row) for group, row in self._figures().items()],
            parts=[_part(one) for one in (trained.outcomes if trained else ())],
            models=_models(trained) if trained else [],
            notes=trained.notes if trained else [],
            charts=_charts(trained) if trained else [],
            operators=_operators(trained) if trained else [],
            machine={
                section: [(name, _shown(value)) for name, value in facts.items()]
                for section, facts in self.gathered.facts.items()
            },
        )


def _finding(one: Finding) -> list[Cell]:
    return [
        Cell(one.level, "one", tone=_TONES[one.level]),
        Cell(one.check, "one"),
        Cell(one.text, below=one.remedy),
    ]


def _part(one: Outcome) -> list[Cell | str]:
    seconds, processes = number(f"{one.seconds:.1f}"), number(str(one.processes))
    return [one.part.replace("_", " "), one.device, processes, one.state, seconds, one.reason]


def _models(trained: Trials) -> list[list[Cell | str]]:
    return [
        [
            name,
            number(f"{model.shape.parameters():,}"),
            number(str(model.batch)),
            number(str(model.length)),
        ]
        for name, model in (
            ("small, for parity", trained.small),
            ("large, for speed", trained.large),
        )
    ]


def _operators(trained: Trials) -> list[list[Cell | str]]:
    done = trained.done(trained.first, "fp32")
    rows = done["runs"][0]["operators"] if done else []
    return [[name, dtypes, device, number(f"{times:,}")] for name, dtypes, device, times in rows]


def _row(group: str, row: dict[str, Any]) -> list[Cell | str]:
    def rate(value: float | None) -> Cell:
        return number("" if value is None else f"{value:,.0f}")

    said, share = row["predicted"], row["mfu"]
    return [
        group,
        rate(row["tokens_per_s"]),
        rate(row["plain_tokens_per_s"]),
        number(f"{said['tokens_per_s']:,.0f}", f"{said['low']:,.0f} to {said['high']:,.0f}"),
        number("" if share is None else f"{share:.1%}"),
        number(f"{row['peak_bytes'] / GIB:.3f}"),
    ]


def _charts(trained: Trials) -> list[str]:
    """The losses of the CPU as a line, and those of the device, or of all processes of the CPU, as
    dots.
    """
    cpu = trained.done("cpu", "fp32")
    other = (
        trained.done(trained.first, "fp32") if trained.first != "cpu" else None
    ) or trained.done(ALL, "fp32")
    if cpu is None:
        return []

    def of(done: dict[str, Any] | None, key: str) -> list[tuple[float, float]]:
        return [(row["updates"] + 1, row[key]) for row in done["runs"][0]["steps"]] if done else []

    place = (
        f"on {trained.kind}, {trained.count if trained.first == 'cpu' else 1} process"
        + "es" * (trained.first == "cpu")
    )
    return [
        chart(
            "loss in fp32: one process of the CPU",
            of(cpu, "loss"),
            of(other, "loss"),
            dots_are=place,
        ),
        chart(
            "gradient norm in fp32", of(cpu, "grad_norm"), of(other, "grad_norm"), dots_are=place
        ),
    ]


def _shown(value: object) -> str:
    return (
        {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    )


def diagnose(
    minutes: float | None, given: dict[str, Any] | None, say: Callable[[str], None]
) -> Diagnosis:
    """Look at this machine; train for at most `minutes`, unless they are None or it cannot train.

    `given` is the config.json of the model to train; None takes models of the devices' size.
    """
    found = Gathered()
    with spinner("looking at this machine"):
        software(found)
        view = devices(found)
        processor(found, view.processes)
        disks(found, view.count)
    if minutes is None:
        return Diagnosis(found, view)
    if any(one.level == "fault" for one in found.findings):
        text = "nothing was trained, as a fault prevents it"
        found.add("training", "warning", text, "mend the faults, then run it again")
        return Diagnosis(found, view)
    return Diagnosis(found, view, train(view, minutes, given, say))


def refuse(file: Path | None, option: str, overwrite: bool) -> None:
    """Raise `ConfigError` for a file that cannot be written in the end, before anything is
    measured.
    """
    if file is None:
        return
    if not str(file).strip() or str(file) == "." or file.is_dir():
        raise ConfigError(
            f"{option}: {str(file)!r} is not a file name; give one such as"
            f" doctor{_ENDINGS[option]}",
            code="config.wrong_value",
        )
    if not file.absolute().parent.is_dir():
        raise ConfigError(
            f"{option}: the folder {file.parent} does not exist; make it, or name another file",
            code="config.wrong_value",
        )
    probe(file.absolute().parent)
    if file.exists() and not overwrite:
        with file.open("rb") as content:
            if not _OURS.search(content.read(4096)):
                raise ConfigError(
                    f"{option}: {file} exists and is no report of smtrain doctor; name another, or"
                    " use --overwrite",
                    code="config.wrong_value",
                )


def write(diagnosis: Diagnosis, page: Path | None, plain: Path | None) -> None:
    """Write the files that were asked for."""
    if plain is not None:
        write_atomically(plain, json.dumps(diagnosis.to_dict(), indent=1) + "\n")
    if page is not None:
        write_atomically(page, diagnosis.page())
