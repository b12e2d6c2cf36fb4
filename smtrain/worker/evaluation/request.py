"""A request for an evaluation: tasks, their data, and how to put the questions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class EvaluationRequest:
    """Tasks by name, and how they are put to a model."""

    tasks: tuple[str, ...]
    data: Path | None = None
    """A folder of task YAMLs with their data, or MMLU as the hub has it (Parquet) or as CSV folders."""
    num_fewshot: int | None = None
    """Worked examples before each question; None: the task's own number."""
    limit: int | None = None
    """Questions of each task (of a group: of each of its tasks); None: all."""
    chat_template: bool = False
    batch_size: int = 8

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tasks": list(self.tasks), "data": str(self.data) if self.data else None}
