"""`train.tokens` in place of `train.steps`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import smtrain
from smtrain.core.errors import ConfigError
from smtrain.stages import keys_of
from tests.client.planner.test_plan import raw


def without_steps(**train: Any) -> dict[str, Any]:
    told = {**raw("llama-3.1-8b", hosts=1), "parallel": {"tp": 8, "sequence_parallel": True}}
    return {**told, "train": {k: v for k, v in told["train"].items() if k != "steps"} | train}


@given(
    tokens=st.integers(1, 10**12),
    batch=st.sampled_from([32, 256, 1024]),
    length=st.sampled_from([64, 2048, 8192]),
)
def test_the_steps_are_the_fewest_that_read_them(tokens: int, batch: int, length: int) -> None:
    config = smtrain.load_config(
        without_steps(tokens=tokens, global_batch_size=batch, seq_len=length, warmup_steps=0),
        target="aws",
    )
    each = batch * length
    assert (config.train.steps - 1) * each < tokens <= config.train.steps * each


def test_they_follow_the_batch_that_is_chosen_and_are_no_part_of_what_a_job_is() -> None:
    told = without_steps(tokens="2B", warmup_steps=0)
    del told["train"]["global_batch_size"]
    del told["parallel"]
    config = smtrain.load_config(told, target="aws")
    each = config.train.global_batch_size * config.train.seq_len
    assert config.train.steps == -(-2 * 10**9 // each)
    by_steps = smtrain.load_config(
        config, set_=["train.tokens=null", f"train.steps={config.train.steps}"], target="aws"
    )
    assert keys_of(by_steps, "train") == keys_of(config, "train")
    twice = smtrain.load_config(
        config, set_=[f"train.global_batch_size={2 * config.train.global_batch_size}"], target="aws"
    )
    assert twice.train.steps == -(-config.train.steps // 2), "a config loaded again counts again"
    assert smtrain.plan(config).fits


def test_a_batch_ramp_counts_in_steps_time_and_tokens() -> None:
    ramp = {"start": 64, "increment": 64, "samples": 20_000}
    told = without_steps(tokens=10**9, global_batch_size=512, seq_len=4096, warmup_steps=0)
    plain = smtrain.load_config(told, target="aws")
    config = smtrain.load_config(
        {**told, "train": {**told["train"], "batch_ramp": ramp, "engine": "native"}},
        target="aws",
        compute={"instance_type": "ml.p5.48xlarge"},
    )
    train = config.train
    assert train.samples * 4096 >= 10**9 > (train.samples - 512) * 4096
    assert train.steps > plain.train.steps
    made, whole = smtrain.plan(config), smtrain.plan(config, set_=["train.batch_ramp=null"])
    smaller = sum(count for count, size in train.batches() if size < 512)
    assert any(
        f"train.batch_ramp: {smaller} of {train.steps} steps have fewer than 512" in w
        for w in made.warnings
    )
    assert made.hours is not None
    assert whole.hours is not None
    more = train.steps / plain.train.steps
    assert whole.hours < made.hours < more * whole.hours, (
        "more steps for the same tokens, of which some are shorter"
    )


@pytest.mark.parametrize(
    ("train", "told"),
    [
        (
            {"tokens": 10, "steps": 4},
            "train.tokens: stands in place of train.steps; leave one of the two out",
        ),
        (
            {"tokens": "many"},
            (
                "train.tokens: got 'many'; a number of tokens looks like 2000000000, 2e9, '2B' or"
                " '500M'"
            ),
        ),
        ({"tokens": 0}, "train.tokens: got 0; it must be at least 1"),
        (
            {"tokens": "1000T"},
            (
                "train.tokens: 1000000000000000 take 15,258,789,063 steps, and at most"
                " 1,000,000,000 are possible; lower it, or raise train.global_batch_size"
            ),
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(train: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        smtrain.load_config(
            without_steps(**{"global_batch_size": 32, "seq_len": 2048, **train}), target="aws"
        )
    assert caught.value.faults == [told]
