"""Every fault of the config's checks, and every way out that its sentence names: none leads to
another fault.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import smtrain
from smtrain import ConfigError
from smtrain.client.config import checks
from smtrain.client.config.checks import cluster, data, kubernetes, machines, pai, train, weights
from smtrain.client.config.checks.rule import ConfigRule, Fault, rule_faults
from smtrain.core.config import JobConfig
from tests import tiers
from tests.client.config.faults import CASES
from tests.client.config.followed import BASES, Case, Desk, begun, read

ENDS = ("compute.image: no image is known for", "compute.role: IAM did not return the ARN")
"""Faults whose remedy is outside, so that no value can be named: a tag that AWS publishes, and a
login.
"""

NAMED = {
    f"{kind} {number}: {one.base}: {one.says}": one
    for kind, some in CASES.items()
    for number, one in enumerate(some)
}
_VERBS = re.compile(r"\b(set|take|leave|give|raise|lower|change|put|copy|save|correct|describe)\b")
"""Words of a remedy: after all its ways have been followed, none is left over."""


def refused(desk: Desk) -> list[str]:
    """The faults of a config: as it is loaded, and as its requests are made."""
    try:
        smtrain.request(smtrain.load_config(desk.raw))
    except ConfigError as error:
        return list(error.faults)
    return []


@dataclass(frozen=True)
class Broken:
    """A case's config with its fault: all faults, and the `id` of each rule that it breaks."""

    desk: Desk
    faults: list[str]
    rules: set[int]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Broken]:
    """The config of a case by its name, made and checked once for all tests."""

    @cache
    def of(name: str) -> Broken:
        case, rules = NAMED[name], set[int]()

        def recording(tried: Iterable[ConfigRule], config: JobConfig) -> Iterator[Fault]:
            for rule in tried:
                found = list(rule_faults([rule], config))
                rules.update(id(rule) for _ in found)
                yield from found

        desk = begun(tmp_path_factory.mktemp("followed") / "given", case.base)
        desk.do(case.broken)
        with pytest.MonkeyPatch.context() as patch:
            for module in (checks, cluster, data, kubernetes, machines, pai, train, weights):
                patch.setattr(module, "rule_faults", recording)
            return Broken(desk, refused(desk), rules)

    return of


@pytest.mark.parametrize("base", BASES)
def test_what_a_case_starts_from_has_no_fault(base: str, tmp_path: Path) -> None:
    assert refused(begun(tmp_path / "given", base)) == []


# In the gate at least one of each section on each base. Every case's fault is found there below.
IN_GATE = tiers.gate([*NAMED], [(name.split()[0], one.base) for name, one in NAMED.items()], 150)


@pytest.fixture(params=IN_GATE)
def told(request: pytest.FixtureRequest, broken: Callable[[str], Broken]) -> tuple[Case, Desk, str]:
    """A case, its config, and the one sentence that refuses it."""
    one, config = NAMED[request.param], broken(request.param)
    (sentence,) = [fault for fault in config.faults if one.says in fault]
    assert one.more or config.faults == [sentence]
    return one, config.desk, sentence


def test_every_way_that_a_sentence_names_is_enough(told: tuple[Case, Desk, str]) -> None:
    one, desk, sentence = told
    left = sentence
    for number, way in enumerate(one.ways):
        words, change = (way, None) if isinstance(way, str) else way
        assert words in left, sentence
        left = left.replace(words, "", 1)
        mended = desk.copy(desk.folder.with_name(f"way{number}"))
        mended.do(read(words, sentence.partition(":")[0]) if change is None else change)
        again = [fault for fault in refused(mended) if not fault.startswith(ENDS)]
        assert again == [], f"{sentence}: {words}"
    assert not _VERBS.search(left.rpartition("; ")[2]), f"{sentence}: a way is not followed"


RULES: tuple[Iterable[ConfigRule], ...] = (
    machines.MESH,
    machines.COMPUTE,
    cluster.CLUSTER,
    kubernetes.KUBERNETES,
    pai.PAI,
    train.TRAIN,
    train.NATIVE,
    train.NXD,
    train.BEST,
    data.SOURCES,
    data.OBJECTIVE,
    data.PRETRAIN_ONLY,
    data.MEGATRON,
    [data.PHONES, data.TEMPLATE],
    weights.WEIGHTS,
    weights.HUB_RULES,
    [weights.MEGATRON, weights.PEFT],
)
SPOKEN = (
    "client/config/checks/*.py",
    "core/facts/engines.py",
    "client/planner/resolve_mesh.py",
    "client/planner/fallback.py",
)
NOT_REACHED = {
    "; or train.adapter: {} fits in {} GiB with {}": "of a plan, not of a config",
    "the kernel takes no mask": "a warning of a plan, which says why attention is slow",
    "the kernel takes heads of at most {}, and this model's have {}": "the same",
    "the kernel takes lengths of a multiple of {}{}, and train.seq_len is {}": "the same",
}


@pytest.fixture(scope="module")
def everything(broken: Callable[[str], Broken]) -> tuple[list[str], set[int]]:
    """All sentences of the cases, and the rules that they broke."""
    all_broken = [broken(name) for name in NAMED]
    sentences = [fault for config in all_broken for fault in config.faults]
    return sentences, {rule for config in all_broken for rule in config.rules}


def test_every_rule_is_broken_by_a_case(everything: tuple[list[str], set[int]]) -> None:
    """A new rule needs a case above, with each way out that its sentence names."""
    _, met = everything
    assert [rule.keys for rules in RULES for rule in rules if id(rule) not in met] == []
    tables = {id(rule) for rules in RULES for rule in rules}
    for module in (cluster, data, kubernetes, machines, pai, train, weights):
        for value in vars(module).values():
            rules = (
                [value]
                if isinstance(value, ConfigRule)
                else value
                if isinstance(value, tuple)
                else []
            )
            assert {id(rule) for rule in rules if isinstance(rule, ConfigRule)} <= tables


def test_every_sentence_of_the_checks_is_told_to_a_case(
    everything: tuple[list[str], set[int]],
) -> None:
    """Sentences are found in the source, so that a new one without a case fails here."""
    told, _ = everything
    package = Path(smtrain.__file__).parent
    spoken = [
        text
        for way in SPOKEN
        for path in sorted(package.glob(way))
        for text in templates(path.read_text())
    ]
    assert len(spoken) > 130
    lacking = [
        text
        for text in spoken
        if not any(re.search(".*".join(map(re.escape, text.split("{}"))), one) for one in told)
        and text not in NOT_REACHED
    ]
    assert lacking == [], "\n".join(lacking)


def templates(source: str) -> Iterator[str]:
    """The texts of a module that are long enough to be (part of) a sentence, each value in them as
    `{}`.
    """
    tree = ast.parse(source)
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))  # docstrings
        elif isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        keys = all("." in word or word == "{}" for word in text.split())
        if len(text.replace("{}", "")) >= 18 and text.strip().count(" ") >= 2 and not keys:
            yield text
