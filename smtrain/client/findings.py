"""The results of the checks: one row each, and all of them as a table or as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, Literal

Level = Literal["ok", "warning", "fault"]
_ORDER: tuple[Level, ...] = ("fault", "warning", "ok")
_COLOURS: dict[Level, str] = {"fault": "#c62828", "warning": "#8a5a00", "ok": "#2e7d32"}
_BADGE = "color:#fff;border-radius:4px;padding:0 .5em"  # on light and dark pages alike
_NO_MATH = "tex2jax_ignore mathjax_ignore"  # two dollar signs are no formula


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    """The check's name: quotas, role, buckets..."""
    level: Level
    """`fault`: the job would fail or do something else; `warning`: it may, or the check failed;
    else `ok`.
    """
    text: str
    remedy: str = ""
    """The remedy; empty if there is nothing to do."""


@dataclass(frozen=True)
class Report:
    """Every finding of one pass, in the order of the checks."""

    findings: tuple[Finding, ...]

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    @property
    def ok(self) -> bool:
        """True if there are no faults; there may be warnings."""
        return not self.faults

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "fault"]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "warning"]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}

    def sentences(self, *levels: Level) -> list[str]:
        """One line a finding: the check, the text, the remedy."""
        findings = [finding for finding in self.findings if finding.level in levels]
        return [f"{f.check}: {f.text}" + (f"; {f.remedy}" if f.remedy else "") for f in findings]

    def __str__(self) -> str:
        if not self.findings:
            return "nothing was checked"
        width = max(len(finding.check) for finding in self.findings)
        lines = []
        for finding in self._worst_first():
            lines.append(f"{finding.level:7}  {finding.check:{width}}  {finding.text}")
            if finding.remedy:
                lines.append(f"{'':7}  {'':{width}}  -> {finding.remedy}")
        return "\n".join([*lines, self._count()])

    def _repr_html_(self) -> str:
        rows = []
        for f in self._worst_first():
            remedy = f"<br>&rarr; {escape(f.remedy)}" if f.remedy else ""
            level = f'<b style="{_BADGE};background:{_COLOURS[f.level]}">{f.level}</b>'
            rows.append(
                f"<tr><td>{level}</td><td>{escape(f.check)}</td>"
                f'<td style="text-align:left">{escape(f.text)}{remedy}</td></tr>'
            )
        return f'<table class="{_NO_MATH}">{"".join(rows)}</table><div>{self._count()}</div>'

    def _worst_first(self) -> list[Finding]:
        return sorted(self.findings, key=lambda finding: _ORDER.index(finding.level))

    def _count(self) -> str:
        counts = {level: sum(f.level == level for f in self.findings) for level in _ORDER}
        plurals = {level: "" if count == 1 else "s" for level, count in counts.items()}
        return (
            f"{counts['fault']} fault{plurals['fault']}, {counts['warning']}"
            f" warning{plurals['warning']}, {counts['ok']} ok"
        )
