"""Peaks of fully sharded training against the plan.

The gate compares the plan with peaks that were measured on CPUs on 2026-11-27 (torch 2.13), as bytes
of tensors (`peaks.py`); `scripts/test --full` measures them again.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.planner.peaks import estimate, measure
from tests.worker.engine.world import World

FAMILIES = "llama", "qwen3", "gemma3_text", "qwen3_moe"
PEAKS: dict[str, tuple[tuple[int, ...], ...]] = {
    "112 cp2 m1": ((17456064,), (17646368,), (16277372,), (32483944,)),
    "112 cp2 m1 bf16": ((14014016,), (14185840,), (13451084,), (26705976,)),
    "112 m1": ((26337592,), (26719128,), (25119572,), (49132256,)),
    "114 m1": ((18563648,), (18944416,), (18085628,), (33959256,)),
    "114 m1 bf16 full": ((13322048,), (13323376,), (12325308,), (25812008,)),
    "114 m2": ((19818752,), (20959584,), (21446780,), (34280384,)),
    "114 m2 bf16": ((14441600,), (15124720,), (16035276,), (25898208,)),
    "122 m1 bf16": (
        (14478440, 13787508),
        (14820792, 13902532),
        (15793160, 14236564),
        (27837120, 26873284),
    ),
    "122 m2": (
        (18376936, 17167092),
        (19582136, 17770372),
        (21445576, 18610964),
        (31232464, 31014036),
    ),
    "122 m2 bf16 full": (
        (12245864, 13318004),
        (12415896, 13319364),
        (12993128, 13334228),
        (24272968, 26269876),
    ),
    "212 m1 sp": ((13359552,), (13575584,), (12796028,), (25072872,)),
    "212 m2 bf16 full": ((11268288,), (11383904,), (10954300,), (21134872,)),
}
"""Mesh -> for each of `FAMILIES` the peak bytes of the worst rank of each pipeline stage."""
CASES = [
    pytest.param(family, mesh, peaks, id=f"{family} {mesh}")
    for mesh, row in PEAKS.items()
    for family, peaks in zip(FAMILIES, row, strict=True)
]
EXPERTS: list[tuple[str, str, tuple[tuple[int, float], ...]]] = [
    ("qwen3_moe", "114 m1 ep2", ((26873328, 0.9492),)),
    ("qwen3_moe", "114 m2 ep2 bf16", ((21904296, 1.0562),)),
    ("qwen3_moe", "212 m1 ep2 sp", ((21798608, 1.0786),)),
    ("qwen3_moe", "122 m2 ep2", ((26089168, 0.9854), (25968956, 1.0146))),
    ("qwen3_moe", "122 m1 ep2 bf16 full", ((21100552, 1.0117), (21375932, 1.0117))),
    ("qwen3_moe", "114 m1 ep4", ((25105304, 1.1543),)),
    ("qwen3_moe", "114 m1 ep2 full", ((23538464, 0.9492),)),
    ("qwen3_moe", "112 m1 ep2 bf16", ((38902088, 1.0166),)),
    ("qwen3_moe", "112 cp2 m1 ep2", ((24782952, 0.9893),)),
    ("deepseek_v3", "114 m1 ep2", ((31362188, 1.0983),)),
    ("deepseek_v3", "114 m2 ep2 bf16", ((25188388, 1.097),)),
    ("deepseek_v3", "122 m2 ep2", ((29489844, 0.9089), (33060068, 1.0911))),
    ("deepseek_v3", "114 m1 ep4 full", ((25865044, 0.918),)),
    ("gpt_oss", "114 m1 ep2", ((27380360, 1.0391),)),
]
"""Family, mesh, and of each stage's worst rank the peak and its experts' rows over the mean."""
NEAR = 0.03


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    made = {size: World(size) for size in (2, 4)}
    yield made
    for world in made.values():
        world.stop()


@pytest.mark.parametrize(("family", "mesh", "peaks"), CASES)
def test_the_plan_is_within_3_percent_of_measured_peaks(
    family: str, mesh: str, peaks: tuple[int, ...]
) -> None:
    assert estimate(family, f"{mesh} shards") == pytest.approx(list(peaks), rel=NEAR)


@pytest.mark.parametrize(("family", "mesh", "rows"), EXPERTS)
def test_so_it_is_with_experts_that_ep_divides(
    family: str, mesh: str, rows: tuple[tuple[int, float], ...]
) -> None:
    peaks, shares = zip(*rows, strict=True)
    assert estimate(family, f"{mesh} shards", shares=[*shares]) == pytest.approx(peaks, rel=NEAR)


@pytest.mark.full
@pytest.mark.parametrize(("family", "mesh", "rows"), EXPERTS)
def test_peaks_of_experts_are_those_of_the_table(
    family: str, mesh: str, rows: tuple[tuple[int, float], ...], worlds: dict[int, World]
) -> None:
    measured = [top for _, _, top, _ in measure(family, f"{mesh} shards", worlds)]
    assert measured == pytest.approx([peak for peak, _ in rows], rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize(("family", "mesh", "peaks"), CASES)
def test_peaks_are_those_of_the_table(
    family: str, mesh: str, peaks: tuple[int, ...], worlds: dict[int, World]
) -> None:
    measured = [top for _, _, top, _ in measure(family, f"{mesh} shards", worlds)]
    assert measured == pytest.approx(list(peaks), rel=0.01)
