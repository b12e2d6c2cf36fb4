"""The options of a preparation, as a config has them."""

from __future__ import annotations

from smtrain.core.config.schema import JobConfig, other_inputs, with_inputs
from smtrain.worker.data.clean.holdout import HoldOut
from smtrain.worker.data.prepare_options import PrepareOptions

MODEL = {"path": "model"}


def test_a_config_without_keys_has_the_defaults() -> None:
    assert PrepareOptions.of(JobConfig.model_validate({"model": MODEL})) == PrepareOptions(
        seq_len=4096
    )


def test_other_inputs_may_lie_elsewhere() -> None:
    raw = {
        "model": MODEL,
        "data": {
            "decontaminate": {"path": "tests", "text_column": "q"},
            "language": {"keep": ["de"], "model": "lid.bin"},
            "shard_size": 2,
        },
        "train": {"validation": {"path": "held"}, "objective": "pretrain", "seq_len": 64},
    }
    placed = with_inputs(
        JobConfig.model_validate(raw), lambda channel, path: f"/in/{channel}/{path}"
    )
    assert [path for _, _, path in other_inputs(placed)] == [
        "/in/validation/held",
        "/in/tests/tests",
        "/in/language/lid.bin",
    ]
    options = PrepareOptions.of(placed, listings="abc")
    assert (options.seq_len, options.shard_bytes, options.listings) == (64, 2_000_000_000, "abc")
    assert options.holdout == HoldOut(path="/in/validation/held")
    assert options.cleaning.tests is not None
    assert options.cleaning.languages is not None
    assert (options.cleaning.tests.path, options.cleaning.tests.text_column) == (
        "/in/tests/tests",
        "q",
    )
    assert (options.cleaning.languages.model, options.cleaning.languages.codes) == (
        "/in/language/lid.bin",
        ("de",),
    )
