"""Tasks in this process, in a chosen order: the results of machines, without their time."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from smtrain.worker.data.prepare.spread.work import TaskOutcome, outcome


class InThisProcess:
    """Runs tasks one by one, some of them twice, and ends them out of order.

    `fault` is asked before each.
    """

    def __init__(
        self,
        draw: random.Random,
        fault: Callable[[str, Any], TaskOutcome | None] = lambda name, label: None,
    ):
        self._draw, self._fault = draw, fault
        self.done: list[tuple[str, Any]] = []

    def run(
        self,
        function: Callable[..., Any],
        shared: tuple[Any, ...],
        items: Iterator[tuple[Any, tuple[Any, ...]]],
        waiting: Callable[[], None],
        *,
        large: bool = False,
        threads: bool = False,
    ) -> Iterator[tuple[Any, TaskOutcome]]:
        while ahead := list(islice(items, self._draw.choice([1, 4, 16]))):
            self._draw.shuffle(ahead)
            for label, arguments in ahead:
                waiting()
                result = self._fault(function.__name__, label)
                for _ in range(1 if result else self._draw.choice([1, 1, 2])):
                    context, given = pickle.loads(
                        pickle.dumps((shared, arguments))
                    )  # as on a machine
                    result = result or outcome(function, *context, *given)
                self.done.append((function.__name__, arguments))
                assert result
                yield label, pickle.loads(pickle.dumps(result))
