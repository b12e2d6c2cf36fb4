"""Plans of mixtures of experts, from the config.json of published models alone."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import inf, log
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.planner.calibration import (
    fit,
    leave_one_out,
    nearest,
    predict_speed,
    published_experts,
    residual,
)
from smtrain.client.planner.machines import Machine, Mesh, Work, mesh_faults, named_shape
from smtrain.client.planner.memory import core_memory
from smtrain.client.planner.search import search
from smtrain.client.planner.throughput import EXPERTS, Coefficients, exchange_time, step_time
from smtrain.core.errors import ConfigError
from smtrain.core.facts import table
from smtrain.core.model.shape import ModelShape

# Published values of the keys that decide sizes (Hugging Face, 2026-11-26).
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
OSS_20B = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_local_experts": 32,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "vocab_size": 201088,
    "tie_word_embeddings": False,
}
OSS_120B = {
    **OSS_20B,
    "num_local_experts": 128,
    "num_hidden_layers": 36,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}


@pytest.mark.parametrize(
    ("config", "name", "total", "active", "gflop"),
    [  # the first two numbers are those of transformers 5.24's model on the meta device
        (QWEN3_30B, "Qwen3-30B-A3B", 30_532_122_624, 3_353_032_704, 18.25),
        (MIXTRAL, "Mixtral-8x7B", 46_702_792_704, 12_879_925_248, 76.5),
        (OSS_20B, "gpt-oss-20b", 20_914_757_184, 4_187_440_704, 21.6),
        (OSS_120B, "gpt-oss-120b", 116_829_156_672, 5_711_982_912, 30.8),
    ],
    ids=["qwen3-30b-a3b", "mixtral", "gpt-oss-20b", "gpt-oss-120b"],
)
def test_parameters_are_exact(
    config: dict[str, Any], name: str, total: int, active: int, gflop: float
) -> None:
    shape = ModelShape.from_config(config)
    assert (shape.parameters(), shape.active_parameters()) == (total, active)
    assert shape.flops_per_token(1) / 1e9 == pytest.approx(gflop, rel=5e-3)
    known = named_shape(name)
    assert known is not None
    assert (known.parameters(), known.active_parameters()) == (total, active)


def work(config: dict[str, Any] = QWEN3_30B, **changes: Any) -> Work:
    return replace(Work(ModelShape.from_config(config), 4096, 64), **changes)


def test_ep_divides_weights_and_gradients_of_experts_and_no_state() -> None:
    machine = Machine.of("ml.p5.48xlarge", 1)
    one, eight = (core_memory(work(), machine, Mesh(1, 1, 8, ep=ep), 0) for ep in (1, 8))
    experts = 48 * 128 * 3 * 2048 * 768
    assert one.weights - eight.weights == pytest.approx(experts * 7 / 8 * 2, rel=1e-6)
    assert one.gradients - eight.gradients == pytest.approx(experts * 7 / 8 * 4, rel=1e-6)
    assert eight.optimizer == pytest.approx(one.optimizer, rel=1e-6)
    balanced = core_memory(work(skew=1.0), machine, Mesh(1, 1, 8, ep=8), 0)
    assert balanced.activations < eight.activations


def test_messages_grow_with_ep_and_leave_the_host_dearly() -> None:
    inside, outside = Machine.of("ml.p5.48xlarge", 1), Machine.of("ml.p5.48xlarge", 2)
    times = [step_time(work(), inside, Mesh(1, 1, 8, ep=ep)).expert_parallel for ep in (1, 2, 4, 8)]
    assert times[0] == 0
    assert times[1] / times[3] == pytest.approx((1 / 2) / (7 / 8))
    k = Coefficients.for_machine(inside)
    slow, sent = k.network_share * 4e11 / 8 * k.swap_share, 4 * 48 * 8 * 4096 * 2048 * 2
    far = (
        step_time(work(), outside, Mesh(1, 1, 16, ep=16)).expert_parallel / 4
    )  # 4 micro-batches in place of 8
    assert far == pytest.approx(times[3] / 8 * 7 / 16 / (7 / 8) + sent * 8 / 16 / slow), (
        "8 of 16 on another host"
    )
    parts = step_time(work(whole_experts=True), outside, Mesh(2, 1, 8, ep=8)).expert_parallel
    assert parts < step_time(work(), outside, Mesh(2, 1, 8, ep=8)).expert_parallel / 2, (
        "half of the tokens, one host"
    )
    dense = replace(work(), shape=replace(work().shape, experts=None))
    assert "expert_parallel" not in step_time(dense, inside, Mesh(1, 1, 8)).parts()


def test_only_experts_that_a_token_chooses_take_time() -> None:
    machine, mesh = Machine.of("ml.p5.48xlarge", 1), Mesh(1, 1, 8)
    plain = replace(
        Coefficients.for_machine(machine),
        expert_products=1.0,
        routed_bytes_per_flop=inf,
        kernels=None,
    )

    def compute(chosen: int, k: Coefficients = plain, **changes: Any) -> float:
        return step_time(
            work({**QWEN3_30B, "num_experts_per_tok": chosen}, **changes), machine, mesh, k
        ).compute

    share = 4 * 48 * 3 * 2048 * 768 / (3_353_032_704 - 151936 * 2048)
    assert (compute(8) - compute(4)) / compute(8) == pytest.approx(share, rel=0.01)
    padded = (compute(8, capacity=1.25) - compute(8)) / compute(8)
    assert padded == pytest.approx(share * 2 * 0.25, rel=0.01), (
        "rows that fill a capacity are multiplied too"
    )
    sorting = compute(8, replace(plain, routed_bytes_per_flop=1e-3)) - compute(8)
    # 64 sequences over 8 ranks; forward and, twice as long, backward; 8 hidden states of 2 bytes
    # for each token
    assert sorting == pytest.approx(8 * 3 * 48 * 4096 * 8 * 2048 * 2 / (1e-3 * machine.core_flops))


def test_gradients_of_experts_are_exchanged_between_the_ranks_that_hold_the_same() -> None:
    k, hosts = (
        Coefficients.for_machine(Machine.of("ml.p5.48xlarge", 1)),
        Machine.of("ml.p5.48xlarge", 2),
    )
    one, eight, all_ = (exchange_time(work(), hosts, Mesh(1, 1, 16, ep=ep), k) for ep in (1, 8, 16))
    assert eight == pytest.approx(one), "a host has all experts either way"
    experts = 48 * 128 * 3 * 2048 * 768
    assert all_ == pytest.approx(one * (1 - experts / 30_532_122_624)), "no other rank has the same"


def test_each_published_figure_is_as_far_off_as_the_table_says() -> None:
    k = Coefficients.for_machine(Machine.of("ml.p5.48xlarge", 1))
    off = {
        run.id: round(100 * (predict_speed(run, k) / run.sequences_per_s - 1))
        for run in published_experts()
    }
    assert off == {
        "e01": -26,
        "e02": 19,
        "e03": 12,
        "e04": 25,
        "e05": 37,
        "e06": 29,
        "e08": -34,
        "e10": -25,
        "e11": -29,
        "e12": 20,
        "e13": -21,
    }
    assert all(
        abs(log(1 + error / 100)) < 2.13 * table("throughput_gpu")["experts"]["residual"]
        for error in off.values()
    )
    # What the pages print of two of them next to the step: tokens a second and GPU.
    rates = {run.id: run.sequences_per_s * 4096 / run.machine.world for run in published_experts()}
    assert [rates["e01"], rates["e03"]] == pytest.approx([12_040, 7_626], rel=2e-3)


@pytest.mark.full
def test_the_shipped_coefficients_of_experts_are_those_of_the_shipped_runs() -> None:
    runs, shipped = published_experts(), table("throughput_gpu")["experts"]
    fitted = fit(runs)
    assert {name: getattr(fitted, name) for name in EXPERTS} == pytest.approx(
        {name: shipped[name] for name in EXPERTS}, rel=0.01
    )
    assert shipped["residual"] == pytest.approx(residual(runs, fitted), rel=0.01)
    left = leave_one_out(runs)
    assert all(one.is_inside for one in left)
    assert max(abs(one.error) for one in left) < 0.5


def test_the_search_takes_ep_where_experts_would_not_fit() -> None:
    machine = Machine.of("ml.p5.48xlarge", 4)
    best = search(work(), [machine])[0].mesh
    assert best.ep > 1
    assert not list(mesh_faults(work(), machine, best))
    assert any(
        "does not divide the 128 experts" in fault
        for fault in mesh_faults(work(), machine, replace(best, ep=3))
    )
    near = nearest(work(), machine, best)
    assert near is not None
    assert near.is_calibrated
    assert (
        nearest(work(), Machine.of("ml.p4d.24xlarge", 4), best) is None
    )  # its runs are of dense models


def test_a_plan_says_both_counts() -> None:
    planned = smtrain.plan(
        {
            "name": "moe",
            "model": {"path": "hf://Qwen/Qwen3-30B-A3B"},
            "data": {"path": "s3://texts/text"},
        },
        compute={"instance_type": "ml.p5.48xlarge", "instance_count": 4},
        parallel="auto",
    )
    assert (planned.parameters, planned.active_parameters) == (30_532_122_624, 3_353_032_704)
    assert "30.53 B parameters, 3.35 B of them active on 4 x ml.p5.48xlarge" in str(planned)
    assert planned.calibrated
    assert planned.sequences_per_s is not None
    assert planned.sequences_per_s["value"] > 1.9 * planned.sequences_per_s["low"], (
        "eleven runs spread widely"
    )
    assert any("NeMo AutoModel's and Megatron-core's" in warning for warning in planned.warnings)
    assert planned.fits
    assert (planned.mesh.tp, planned.mesh.ep) == (
        1,
        8,
    ), "as NeMo's and Megatron-core's runs on hosts of 8"
    assert f"(ep {planned.mesh.ep})" in str(planned)
    assert any("1.5 times the mean" in warning for warning in planned.warnings)


def test_on_trainium_a_plan_asks_for_rows_of_one_shape() -> None:
    config: Any = {
        "name": "moe",
        "model": {"path": "hf://Qwen/Qwen3-30B-A3B"},
        "data": {"path": "s3://texts/text"},
    }
    compute = {"instance_type": "ml.trn2.48xlarge", "instance_count": 2}
    free = smtrain.plan(config, compute=compute, parallel="auto")
    assert any("set parallel.expert_capacity" in warning for warning in free.warnings)
    assert any(
        "published for a mixture of experts on ml.trn2.48xlarge" in warning
        for warning in free.warnings
    )
    assert free.mesh.tp * free.mesh.ep <= 64, "all-to-alls stay on a host"
    mesh = {key: getattr(free.mesh, key) for key in ("tp", "pp", "ep")}
    bound = smtrain.plan(config, compute=compute, parallel={**mesh, "expert_capacity": 1.25})
    assert not any("set parallel.expert_capacity" in warning for warning in bound.warnings)


def test_a_capacity_bounds_the_rows() -> None:
    machine, mesh = Machine.of("ml.p5.48xlarge", 1), Mesh(1, 1, 8, ep=8)
    held = [
        core_memory(work(capacity=share), machine, mesh, 0).activations
        for share in (1.0, 1.25, None)
    ]
    assert held == sorted(held)


@pytest.fixture(params=["by name", "by folder"])
def mixtral(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "by name":
        return "mixtral-8x7b"
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    return str(tmp_path)


def given(**compute: Any) -> dict[str, Any]:
    train = {"steps": 10, "seq_len": 4096, "global_batch_size": 256}
    return {"name": "m", "data": {"path": "s3://bucket/text"}, "train": train, "compute": compute}


@pytest.mark.parametrize(
    "compute", [{}, {"instance_type": "ml.trn1.32xlarge", "instance_count": 16}]
)
@pytest.mark.parametrize("more", [{}, {"best": True}, {"machines": [("ml.trn1.32xlarge", 16)]}])
def test_no_plan_is_made_for_an_engine_without_experts(
    mixtral: str, compute: dict[str, Any], more: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as raised:
        smtrain.plan(given(**compute), model=mixtral, target="aws", **more)
    [fault] = raised.value.faults
    assert fault.startswith(
        "model.path: engine nxd trains no mixtral models; set train.engine: native and take "
    )


@pytest.mark.parametrize(
    "compute", [{}, {"instance_type": "ml.trn1.32xlarge", "instance_count": 16}]
)
def test_machines_that_are_named_are_planned_though_its_own_would_not_do(
    mixtral: str, compute: dict[str, Any]
) -> None:
    machines = [("ml.trn1.32xlarge", 16), ("ml.p5.48xlarge", 4)]
    plan = smtrain.plan(given(**compute), model=mixtral, machines=machines)
    assert plan.fits
    assert {choice.machines for choice in plan.choices} == {"4 x ml.p5.48xlarge"}


@pytest.mark.parametrize(
    ("section", "key"), [("parallel", "expert_capacity"), ("train", "aux_loss")]
)
def test_options_of_experts_are_refused_for_a_dense_model_that_is_known_by_name(
    section: str, key: str
) -> None:
    asked = given(instance_type="ml.p5.48xlarge")
    asked[section] = {**asked.get(section, {}), key: 1.5}
    with pytest.raises(
        ConfigError, match=f"{section}.{key}: a llama model has no experts; leave it out"
    ):
        smtrain.plan(asked, model="llama-3.1-8b")


def test_the_ep_that_a_fault_names_is_one_that_the_torus_connects(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_30B, "num_experts": 96}))
    asked = given(instance_type="ml.trn2.48xlarge", instance_count=2)
    asked |= {
        "model": {"path": str(tmp_path), "init": "scratch"},
        "data": {"prepared": "s3://bucket/data"},
    }
    asked["parallel"] = {"tp": 1, "pp": 1, "ep": 64}
    with pytest.raises(ConfigError) as raised:
        smtrain.load_config(asked, target="aws")
    [fault] = raised.value.faults
    found = re.fullmatch(
        r"parallel\.ep = 64 does not divide the 96 experts .*; ep = (\d+) would do", fault
    )
    assert found
    asked["parallel"]["ep"] = int(found[1])
    assert smtrain.load_config(asked, target="aws").parallel.ep == int(found[1])
