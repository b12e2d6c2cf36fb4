"""The totals that neuron_parallel_compile prints, in its own words."""

from __future__ import annotations

import pytest

from smtrain.worker.engine.nxd.compilation import Listener, Totals


@pytest.mark.parametrize(
    ("lines", "totals"),
    [
        (
            [
                "INFO ||NEURON_PARALLEL_COMPILE||: Total graphs: 3",
                "INFO ||NEURON_PARALLEL_COMPILE||: Total successful compilations: 2",
                "INFO ||NEURON_PARALLEL_COMPILE||: Total failed compilations: 1",
            ],
            Totals(total=3, successful=2, failed=1),
        ),
        (["INFO: No todo hlos found"], Totals(total=0, successful=0, failed=0)),
        (["Total graphs: 3"], None),
    ],
)
def test_the_program_s_totals_are_read(lines: list[str], totals: Totals | None) -> None:
    listener = Listener()
    for line in lines:
        listener.hear(line)
    assert listener.totals == totals
