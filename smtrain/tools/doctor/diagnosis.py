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
from smtrain.core.errors import ConfigError
from smtrain.core.files import no_folder_fault, probe, write_atomically
from smtrain.core.pages.charts import chart
from smtrain.core.pages.page import Cell, number, render
from smtrain.core.spinner import spinner
from smtrain.core.text import align_columns
from smtrain.tools.doctor import verdicts
from smtrain.tools.doctor.devices import TorchView, devices
from smtrain.tools.doctor.doctor_report import Diagnostics
from smtrain.tools.doctor.software import disks, processor, software
from smtrain.tools.doctor.training import ALL_DEVICES, Outcome, Trials, train
from smtrain.version import __version__

MADE_BY = "smtrain doctor"
FORMAT = 1
"""Version of the JSON, which docs/doctor.md describes."""
_MADE_BY_US = re.compile(rf'(content=|"made_by": )"{MADE_BY}"'.encode())
_ENDINGS = {"--json": ".json", "--page": ".html"}
_TONES = {"ok": "good", "warning": "warn", "fault": "bad"}


@dataclass(frozen=True)
class Diagnosis:
    """All that was found about a machine."""

    machine: Diagnostics
    view: TorchView
    trials: Trials | None = None
    """The training; None without --train, and if the machine cannot train."""

    @property
    def report(self) -> Report:
        """The findings about the machine and its training."""
        machine_findings = list(self.machine.findings)
        return Report(
            tuple(
                machine_findings
                + (verdicts.findings(self.trials, self.view) if self.trials else [])
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as docs/doctor.md describes them."""
        report = self.report
        training = (
            None if self.trials is None else {**self.trials.to_dict(), "figures": self._figures()}
        )
        return {
            "made_by": MADE_BY,
            "format": FORMAT,
            "smtrain": __version__,
            **report.to_dict(),
            "machine": self.machine.facts,
            "training": training,
        }

    def __str__(self) -> str:
        rows = [
            [section if k == 0 else "", name, _format_value(value)]
            for section, facts in self.machine.facts.items()
            for k, (name, value) in enumerate(facts.items())
        ]
        parts = (
            [] if self.trials is None else [*align_columns(self._parts()), *self.trials.notes, ""]
        )
        return "\n".join([*align_columns(rows), "", *parts, str(self.report)])

    def _parts(self) -> list[list[str]]:
        assert self.trials is not None
        return [
            ["part", "device", "processes", "state", "seconds"],
            *(
                [
                    outcome.part.replace("_", " "),
                    outcome.device,
                    str(outcome.processes),
                    outcome.state,
                    f"{outcome.seconds:.1f}",
                ]
                for outcome in self.trials.outcomes
            ),
        ]

    def _figures(self) -> dict[str, Any]:
        """The figures of speed and memory by group, with the planner's predictions."""
        trials, figures = self.trials, dict[str, Any]()
        for group in dict.fromkeys((trials.first, ALL_DEVICES)) if trials else ():
            assert trials is not None
            speed, prediction = (
                trials.result_of(group, "speed"),
                verdicts.prediction(trials, self.view, group),
            )
            if speed is None or prediction is None:
                continue
            plain, processes = (
                trials.result_of(group, "plain_speed"),
                (trials.count if group == ALL_DEVICES else 1),
            )
            figures[group] = {
                "processes": processes,
                "tokens_per_s": speed["tokens_per_s"],
                "plain_tokens_per_s": plain["tokens_per_s"] if plain else None,
                "mfu": verdicts.mfu(trials, speed, prediction, processes),
                "predicted": asdict(prediction),
                "peak_bytes": speed["peak_bytes"],
                "plain_peak_bytes": plain["peak_bytes"] if plain else None,
            }
        return figures

    def page(self) -> str:
        """One HTML document that fetches nothing."""
        trials, report = self.trials, self.report
        return render(
            "doctor.html",
            hide_secrets=True,
            title="smtrain doctor",
            generator=MADE_BY,
            version=__version__,
            now=datetime.datetime.now(datetime.timezone.utc),
            ok=report.ok,
            findings=[
                _finding(item)
                for level in list(_TONES)[::-1]
                for item in report
                if item.level == level
            ],
            figures=[_row(group, row) for group, row in self._figures().items()],
            parts=[_part(item) for item in (trials.outcomes if trials else ())],
            models=_models(trials) if trials else [],
            notes=trials.notes if trials else [],
            charts=_charts(trials) if trials else [],
            operators=_operators(trials) if trials else [],
            machine={
                section: [(name, _format_value(value)) for name, value in facts.items()]
                for section, facts in self.machine.facts.items()
            },
        )


def _finding(finding: Finding) -> list[Cell]:
    return [
        Cell(finding.level, "one", tone=_TONES[finding.level]),
        Cell(finding.check, "one"),
        Cell(finding.text, below=finding.remedy),
    ]


def _part(outcome: Outcome) -> list[Cell | str]:
    seconds, processes = number(f"{outcome.seconds:.1f}"), number(str(outcome.processes))
    return [
        outcome.part.replace("_", " "),
        outcome.device,
        processes,
        outcome.state,
        seconds,
        outcome.reason,
    ]


def _models(trials: Trials) -> list[list[Cell | str]]:
    return [
        [
            name,
            number(f"{model.shape.parameters():,}"),
            number(str(model.batch)),
            number(str(model.length)),
        ]
        for name, model in (
            ("small, for parity", trials.small),
            ("large, for speed", trials.large),
        )
    ]


def _operators(trials: Trials) -> list[list[Cell | str]]:
    results = trials.result_of(trials.first, "fp32")
    rows = results["runs"][0]["operators"] if results else []
    return [[name, dtypes, device, number(f"{times:,}")] for name, dtypes, device, times in rows]


def _row(group: str, row: dict[str, Any]) -> list[Cell | str]:
    def rate(value: float | None) -> Cell:
        return number("" if value is None else f"{value:,.0f}")

    predicted_speed, share = row["predicted"], row["mfu"]
    return [
        group,
        rate(row["tokens_per_s"]),
        rate(row["plain_tokens_per_s"]),
        number(
            f"{predicted_speed['tokens_per_s']:,.0f}",
            f"{predicted_speed['low']:,.0f} to {predicted_speed['high']:,.0f}",
        ),
        number("" if share is None else f"{share:.1%}"),
        number(f"{row['peak_bytes'] / GIB:.3f}"),
    ]


def _charts(trials: Trials) -> list[str]:
    """The losses of the CPU as a line, and those of the device, or of all processes of the CPU, as
    dots.
    """
    cpu = trials.result_of("cpu", "fp32")
    reference = (
        trials.result_of(trials.first, "fp32") if trials.first != "cpu" else None
    ) or trials.result_of(ALL_DEVICES, "fp32")
    if cpu is None:
        return []

    def of(results: dict[str, Any] | None, key: str) -> list[tuple[float, float]]:
        return (
            [(row["updates"] + 1, row[key]) for row in results["runs"][0]["steps"]]
            if results
            else []
        )

    place = f"on {trials.kind}, {trials.count if trials.first == 'cpu' else 1} process" + "es" * (
        trials.first == "cpu"
    )
    return [
        chart(
            "loss in fp32: one process of the CPU",
            of(cpu, "loss"),
            of(reference, "loss"),
            dots_are=place,
        ),
        chart(
            "gradient norm in fp32",
            of(cpu, "grad_norm"),
            of(reference, "grad_norm"),
            dots_are=place,
        ),
    ]


def _format_value(value: object) -> str:
    return (
        {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    )


def diagnose(
    minutes: float | None, model_config: dict[str, Any] | None, say: Callable[[str], None]
) -> Diagnosis:
    """Look at this machine; train for at most `minutes`, unless they are None or it cannot train.

    `model_config` is the config.json of the model to train; None takes models of the devices' size.
    """
    diagnostics = Diagnostics()
    with spinner("looking at this machine"):
        software(diagnostics)
        view = devices(diagnostics)
        processor(diagnostics, view.processes)
        disks(diagnostics, view.count)
    if minutes is None:
        return Diagnosis(diagnostics, view)
    if any(finding.level == "fault" for finding in diagnostics.findings):
        text = "nothing was trained, as a fault prevents it"
        diagnostics.add("training", "warning", text, "mend the faults, then run it again")
        return Diagnosis(diagnostics, view)
    return Diagnosis(diagnostics, view, train(view, minutes, model_config, say))


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
    if fault := no_folder_fault(file.parent):
        raise ConfigError(
            f"{option}: {fault}",
            code="config.wrong_value",
        )
    probe(file.absolute().parent)
    if file.exists() and not overwrite:
        with file.open("rb") as content:
            if not _MADE_BY_US.search(content.read(4096)):
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
