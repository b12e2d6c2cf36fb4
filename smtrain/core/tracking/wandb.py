"""Weights & Biases: one run, resumed under the same id; offline (WANDB_MODE=offline), a folder to
sync later.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from smtrain.core.config.track import Wandb
from smtrain.core.errors import SmtrainError
from smtrain.core.extras import missing_module, present
from smtrain.core.files import parse_json, write_atomically
from smtrain.core.tracking.settings import TrackedRun, TrackedStep


class WandbTracker:
    """The steps of one run. `folder` has W&B's files, and the last step of an offline run."""

    name = "Weights & Biases"

    def __init__(
        self, options: Wandb, tracked_run: TrackedRun, folder: Path, key: Callable[[], str] | None
    ) -> None:
        self._options, self._tracked, self._folder, self._key = options, tracked_run, folder, key
        self._run: Any = None
        self._last = -1

    def begin(self, first: TrackedStep) -> set[tuple[str, int]]:
        """Open the run.

        W&B's history only grows, so steps up to its last one are not sent again.
        """
        if not present("wandb"):
            raise SmtrainError(missing_module("wandb"))
        import wandb

        tracked_run, stamp = self._tracked, f"{self._tracked.job}@{self._tracked.stamp}"
        saved_state = self._read_state()
        fresh = first.step <= 1 and stamp not in saved_state.get("jobs", [])
        number = saved_state.get("number", 0) + (1 if fresh and saved_state else 0)
        if self._key is not None and "WANDB_API_KEY" not in os.environ:
            os.environ["WANDB_API_KEY"] = (
                self._key()
            )  # wandb reads it from the environment of this process
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._options.project,
            entity=self._options.entity,
            name=tracked_run.run,
            dir=str(self._folder),
            id=f"{tracked_run.id}-{number}" if number else tracked_run.id,
            resume="allow",
            config=dict(tracked_run.parameters),
            tags=["smtrain"],
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        last_step = -1 if fresh else saved_state.get("last", -1)
        self._last = max(last_step, int(self._run.starting_step) - 1)
        self._note(
            {
                "number": number,
                "jobs": sorted({*([] if fresh else saved_state.get("jobs", [])), stamp}),
            }
        )
        return {(kind, step) for step in range(self._last + 1) for kind in ("loss", "val_loss")}

    def write(self, records: Sequence[TrackedStep]) -> None:
        for record in records:
            numbers = {
                key: value for key, value in record.numbers.items() if key not in ("step", "of")
            }
            self._run.log(numbers, step=record.step)
            self._last = max(self._last, record.step)
        self._note({})

    def end(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "Completed" else 1)

    def _read_state(self) -> dict[str, Any]:
        try:
            content = parse_json(self._file.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def _note(self, new_state: dict[str, Any]) -> None:
        content = json.dumps({**self._read_state(), **new_state, "last": self._last}) + "\n"
        write_atomically(self._file, content, sync=False)

    @property
    def _file(self) -> Path:
        return self._folder / f"{self._tracked.id}.json"
