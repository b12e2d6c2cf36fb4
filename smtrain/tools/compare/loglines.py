"""Steps out of the log lines of other trainers: Megatron-LM, GPT-NeoX, NeMo and neuronx-nemo-megatron, and our own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from smtrain.core.protocol.log_lines import step_record

_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
_ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+\s*\|")
_FIELD = re.compile(rf"([A-Za-z][\w ()/-]*?)\s*:\s*({_NUMBER})(?=[A-Z|\s]|$)")
_EPOCH = re.compile(r"Epoch\s+(\d+):.*?(\d+)/(\d+|\?)\s*\[")
_PAIR = re.compile(rf"([A-Za-z_][\w /]*)=({_NUMBER})")
_OURS = re.compile(r"\bstep=\d{1,15} .*")


def steps(lines: Iterable[str]) -> Iterator[dict[str, float]]:
    """A mapping for every line that tells of a step, by the tool's own names and `step`; other lines are passed over.

    Progress bars overwrite themselves by carriage returns: each of their states is a line.
    """
    for line in lines:
        for state in line.replace("\n", "").split("\r"):
            found = _ours(state) or _megatron(state) or _nemo(state)
            if found:
                yield found


def _ours(line: str) -> dict[str, float] | None:
    match = _OURS.search(line)
    return step_record(match[0]) if match else None


def _megatron(line: str) -> dict[str, float] | None:
    match = _ITERATION.search(line)
    if match is None:
        return None
    fields = (_FIELD.search(part) for part in line[match.end() :].split("|"))
    return {"step": float(match[1])} | {found[1].strip(): float(found[2]) for found in fields if found}


def _nemo(line: str) -> dict[str, float] | None:
    """Lightning's bar. It prints global_step with few digits and counted from 0, so its own count of steps is taken."""
    match = _EPOCH.search(line)
    pairs = {name.strip(): float(value) for name, value in _PAIR.findall(line)} if match else {}
    if match is None or "reduced_train_loss" not in pairs:
        return None
    pairs.pop("loss", None)  # the bar's running mean
    step = pairs.pop("global_step", None)
    done = float(match[2])
    exact = match[1] == "0" or step is None
    return pairs | {"step": done if exact else (step or 0.0) + 1}
