"""Questions with known answers about what config.yaml beside this holds out, for lm-evaluation-harness.

`python examples/python-help/make.py` writes questions.jsonl into the folder `task` beside it, where the task itself is:
each question that the training never sees, its answer, and three answers to other questions of these. Which questions
are held out follows from their text, so make them anew where Python is another.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from smtrain.cli.demo_answers import records
from smtrain.client.planner.resolve import load_config

HERE = Path(__file__).resolve().parent
WRONG, SEED = 3, 1
# Without stage evaluate: a config whose questions are not there yet is refused.
UNASKED = ("evaluate.tasks=[]", "evaluate.data=null")


def make(out: Path) -> int:
    """Write the questions as JSON lines into `out`; gives their number."""
    held = [one for one in records(load_config(HERE / "config.yaml", target="local", set_=UNASKED)) if one.held_out]
    draw = random.Random(SEED)
    with out.open("w", encoding="utf-8") as lines:
        for one in held:
            choices = draw.sample([other.answer for other in held if other.answer != one.answer], WRONG)
            right = draw.randrange(WRONG + 1)
            choices.insert(right, one.answer)
            lines.write(json.dumps({"question": one.question, "choices": choices, "right": right}) + "\n")
    return len(held)


if __name__ == "__main__":
    questions = HERE / "task/questions.jsonl"
    print(f"{make(questions)} questions in {questions}")
