"""Write questions for lm-evaluation-harness about the part that config.yaml holds out.

`python examples/python-help/make.py` writes task/questions.jsonl next to the task's own file: each
question that the training never sees, its answer, and three answers to other questions. The text of
a question decides if it is held out, so run this again with another version of Python.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from smtrain.cli.demo_show import records
from smtrain.client.planner.resolve import load_config

HERE = Path(__file__).resolve().parent
WRONG, SEED = 3, 1
# Without stage evaluate, because load_config refuses a config whose questions do not exist yet.
NO_EVALUATION = ("evaluate.tasks=[]", "evaluate.data=null")


def make(out: Path) -> int:
    """Write the questions as JSON lines to `out`; return their number."""
    config = load_config(HERE / "config.yaml", target="local", set_=NO_EVALUATION)
    held_out = [one for one in records(config) if one.held_out]
    draw = random.Random(SEED)
    with out.open("w", encoding="utf-8") as lines:
        for one in held_out:
            choices = draw.sample(
                [other.answer for other in held_out if other.answer != one.answer], WRONG
            )
            right = draw.randrange(WRONG + 1)
            choices.insert(right, one.answer)
            lines.write(
                json.dumps({"question": one.question, "choices": choices, "right": right}) + "\n"
            )
    return len(held_out)


if __name__ == "__main__":
    questions = HERE / "task/questions.jsonl"
    print(f"{make(questions)} questions in {questions}")
