"""A damaged input of a seed, and what its reader makes of it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from smtrain.core.errors import SmtrainError
from testing.fuzz.damage import damage
from testing.fuzz.forms import Form, Reader
from testing.fuzz.judge import Answer, broken_rule

_REFUSAL = "refused"


class Inputs:
    """Whole inputs of some forms, below a folder."""

    def __init__(self, forms: dict[str, Form], folder: Path) -> None:
        self.forms, self.folder = forms, folder
        self._results: dict[tuple[str, int], str] = {}

    def intact_result(self, name: str, number: int) -> str:
        """The result of a reader for the whole input, which is made at first use; the imports are
        made then too.
        """
        if (name, number) not in self._results:
            intact_folder = self.folder / "whole" / name.replace(" ", "-")
            if not intact_folder.exists():
                intact_folder.mkdir(parents=True)
                self.forms[name].make(intact_folder)
            outcome = result(self.forms[name].readers[number], self.copy(name))
            assert not outcome.startswith("!"), (name, number, outcome)
            self._results[name, number] = outcome
        return self._results[name, number]

    def copy(self, name: str) -> Path:
        """A copy of a whole input, always under the same path."""
        case = self.folder / "case/in"
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(self.folder / "whole" / name.replace(" ", "-"), case)
        return case


def result(reader: Reader, folder: Path) -> str:
    """The text of a result; `_REFUSAL`, or a broken rule behind a mark."""
    try:
        answer = reader(folder)
    except SmtrainError as error:
        return _REFUSAL if str(error).strip() else "!says nothing: an error without text"
    if not isinstance(answer, Answer):
        return answer
    if rule := broken_rule(answer):
        return f"!{rule}"
    return _REFUSAL if answer.status == 2 else ""


class InputCase:
    """The case of a seed."""

    def __init__(self, seed: int, inputs: Inputs, forms: list[str]) -> None:
        self._rng, self.inputs = random.Random(seed), inputs
        self.name = self._rng.choice(forms)
        self.number = self._rng.randrange(len(inputs.forms[self.name].readers))
        self.intact_result = inputs.intact_result(self.name, self.number)
        self.label = f"input {seed}: {self.name}, reader {self.number}"

    def run(self) -> str:
        """The broken rule, or empty text; `label` is complete after it."""
        rng, form = self._rng, self.inputs.forms[self.name]
        folder = self.inputs.copy(self.name)
        files = sorted(path for path in folder.glob(form.files) if path.is_file())
        path = rng.choice(files)
        self.label += f": {path.relative_to(folder)}: {damage(path, rng, pipes=form.pipes)}"
        outcome = result(form.readers[self.number], folder)
        if outcome.startswith("!"):
            return outcome[1:]
        wrong = form.exact and outcome not in (_REFUSAL, self.intact_result)
        return (
            f"another result: {outcome[:300]} instead of {self.intact_result[:300]}"
            if wrong
            else ""
        )
