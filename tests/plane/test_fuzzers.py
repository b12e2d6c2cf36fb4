"""Random odd jobs (`scripts/bench hostile`): a seed always gives the same job; some run on a
control plane.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from . import hostile_job
from .planes import causes

ROOT = Path(__file__).resolve().parents[2]


def test_a_seed_is_always_the_same_job_and_every_family_comes_up() -> None:
    plans = [hostile_job.plan_of(seed) for seed in range(500)]
    assert [plan.text() for plan in plans] == [
        hostile_job.plan_of(seed).text() for seed in range(500)
    ]
    assert set().union(*(plan.families for plan in plans)) == set(hostile_job.FAMILIES)
    assert {plan.end[0] for plan in plans} == {"exit", "signal", "sleep"}


def test_a_job_without_some_families_takes_the_other_steps_unchanged() -> None:
    plan = next(
        plan for seed in range(100) if len((plan := hostile_job.plan_of(seed)).families) > 3
    )
    kept = sorted(plan.families)[:2]
    assert hostile_job.plan_of(plan.seed, kept).steps == [
        step for step in plan.steps if step[0] in kept
    ]


def test_tracebacks_of_a_log_are_told_apart_by_the_last_frame_of_ours() -> None:
    frame = (
        '  File "/x/smtrain/plane/server/{}.py", line 7, in f\n    g()\n  File "/y/other.py", line'
        " 1, in g\n    h()\n"
    )
    trace = "Traceback (most recent call last):\n" + frame + "ValueError: {}\n"
    log = (
        "started\n"
        + trace.format("a", "no")
        + "warning: x\n"
        + trace.format("a", "no")
        + trace.format("b", "yes")
    )
    assert list(causes(log)) == [
        "smtrain/plane/server/a.py:7 f: ValueError: no",
        "smtrain/plane/server/b.py:7 f: ValueError: yes",
    ]


@pytest.mark.full
def test_the_plane_outlasts_some_jobs() -> None:
    command = [
        sys.executable,
        "scripts/benchmarks/hostile.py",
        "--jobs",
        "25",
        "--seed",
        "1000",
        "--json",
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert json.loads(ran.stdout)["jobs"] == 25
