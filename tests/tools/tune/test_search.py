"""The next trial: a grid in order, or Optuna's proposal, which depends only on the trials so
far.
"""

from __future__ import annotations

from smtrain.tools.tune.search import search_of
from smtrain.tools.tune.space import axes_of
from smtrain.tools.tune.trials import Trial


def made(over: list[str], count: int, best: float = 3e-4) -> list[Trial]:
    """`count` trials of a search, whose objective is the distance of the rate from the best one."""
    axes, trials = axes_of(over), list[Trial]()
    search = search_of(axes, count, seed=0)
    while len(trials) < count and (values := search(trials)) is not None:
        rate = float(values["train.lr"])
        trials.append(
            Trial(len(trials) + 1, values, status="finished", value=abs(rate - best) / best)
        )
    return trials


def test_a_grid_is_tried_once_in_its_order() -> None:
    trials = made(["train.lr=1e-4,3e-4", "train.seed=1,2"], 10)
    assert [tuple(trial.values.values()) for trial in trials] == [
        ("1e-4", "1"),
        ("1e-4", "2"),
        ("3e-4", "1"),
        ("3e-4", "2"),
    ]


def test_proposals_stay_in_their_ranges_and_go_on_as_they_would_have() -> None:
    over = ["train.lr=log:1e-5..1e-2", "train.warmup_steps=0..20", "train.schedule=cosine,linear"]
    trials = made(over, 15)
    assert len({str(trial.values) for trial in trials}) == 15, "none is tried twice"
    for trial in trials:
        assert 1e-5 <= float(trial.values["train.lr"]) <= 1e-2
        assert 0 <= int(trial.values["train.warmup_steps"]) <= 20
        assert trial.values["train.schedule"] in ("cosine", "linear")
    axes = axes_of(over)
    assert search_of(axes, 15, seed=0)(trials[:7]) == trials[7].values, (
        "of another process, from the same trials"
    )
    waiting = [*trials[:7], Trial(8, trials[7].values), Trial(9, trials[8].values, status="failed")]
    assert search_of(axes, 15, seed=0)(waiting) not in [trial.values for trial in waiting]


def test_a_small_space_ends_when_all_of_it_was_tried() -> None:
    assert len(made(["train.lr=1e-4,2e-4", "train.warmup_steps=0..1"], 12)) == 4
