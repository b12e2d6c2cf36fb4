"""Time of a training step on this machine's CPUs, compared with a plain torch and transformers
loop.

Both sides of a comparison train the same Llama of about 20 million parameters in the same processes
with one thread each, alternating step by step; a ratio is the median over the rounds of our seconds
over theirs. `over_loop`: one process against a plain transformers loop with fused AdamW.
`over_ddp`: two data-parallel processes against the same loop in torch's DistributedDataParallel.
`full_over_fsdp2`: two fully sharded processes against the same loop with torch's FSDP2 on
transformers' layers; `full_over_zero1`: against our ZeRO-1.
`tp_over_bound` and `pp_over_bound`: two processes against the lower bound over gloo, half the time
of one process (pp: plus the bubble of its micro-batches) and the step's own messages sent without
other work. `experts_over_loop`: one process against the same loop, of a Qwen3-MoE of about 20
million parameters. `ep_over_dp`: two processes that divide its experts against two with all of
them. `experts16_...` and `ep16_...` are the same with 16 experts, of which a token chooses 4.
`ep_places` and `ep16_places`: seconds of a step with divided experts by place, the mean of both
processes, measured in turn with the rest; barriers before the messages show how long a process
waits for the other. `cpu_...` is the same in CPU seconds, which a busy machine changes less.
Progress is printed on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.ports import free_port  # noqa: E402

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "intermediate_size": 1024,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
}
MIXTURE: dict[str, Any] = {
    **CONFIG,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "head_dim": 64,
    "moe_intermediate_size": 384,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
}
MANY_EXPERTS: dict[str, Any] = {
    **MIXTURE,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
LR = 1e-4
Step = Callable[[], object]
# consecutive steps of one side: a step may overlap work not needed yet with the next one
TURN = 2
MICRO_BATCHES = 4  # of the pipeline


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sequences", type=int, default=4, help="per process and step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument(
        "--only",
        choices=sorted(PARTS),
        action="append",
        help="only these comparisons; default: all",
    )
    parser.add_argument(
        "--part", choices=sorted(PARTS), help=argparse.SUPPRESS
    )  # run inside a child process
    options = parser.parse_args()
    if options.part:
        answer = PARTS[options.part][1](options)
        if os.environ["RANK"] == "0":
            print(json.dumps(answer))
        return
    result: dict[str, Any] = {}
    began = time.monotonic()
    for name in options.only or PARTS:
        print(f"{time.monotonic() - began:6.0f} s  {name}", file=sys.stderr, flush=True)
        result |= run_part(name, PARTS[name][0])
    if options.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:22} {shares(value) if isinstance(value, dict) else value}")


def shares(places: dict[str, float]) -> str:
    """A line of text with each place's share of a step."""
    step = sum(places.values())
    return f"{step:.3g} s: " + ", ".join(
        f"{name} {100 * s / step:.3g} %" for name, s in places.items()
    )


def run_part(name: str, processes: int) -> dict[str, Any]:
    """The output of rank 0 of so many processes that run a part."""
    # One thread each, so that two processes do not use more cores than one.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, __file__, *sys.argv[1:], "--part", name]
    ranks = []
    for rank in map(str, range(processes)):
        rank_environment = {**environment, "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=rank_environment)
        )
    out = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"step: part {name} failed")
    figures: dict[str, Any] = json.loads(out[0].splitlines()[-1])
    return figures


# Run inside the processes


def batch(options: argparse.Namespace, rank: int, sequences: int) -> tuple[Any, Any]:
    """Token ids and labels of one rank."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(
        0, CONFIG["vocab_size"], (sequences, options.length + 1), generator=generator
    )  # type: ignore[call-overload]
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def native_step(
    options: argparse.Namespace,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    cut: int = 1,
    ep: int = 1,
    config: dict[str, Any] = CONFIG,
    shard: Literal["optimizer", "full"] = "optimizer",
) -> tuple[Any, Step]:
    """The native engine and one step of it; tp and pp get the batch of two processes, like dp."""
    from smtrain.worker.engine.base import OptimizerOptions, ParallelOptions
    from smtrain.worker.engine.native import NativeEngine

    sequences = options.sequences * tp * pp
    mesh = ParallelOptions(
        tp, pp, dp, sequences // cut, precision=options.precision, ep=ep, shard=shard
    )
    engine = NativeEngine(dict(config), mesh, OptimizerOptions(), None, 0)
    ids, labels = batch(options, engine.dp_rank, sequences)

    def turn() -> None:
        for _ in range(TURN):
            engine.step(ids, labels, LR)
        engine.optimizer.settle()

    return engine, turn


def plain(
    options: argparse.Namespace,
    sequences: int,
    parallel: Literal["ddp", "fsdp2"] | None = None,
    config: dict[str, Any] = CONFIG,
) -> Step:
    """The usual hand-written loop: bf16 autocast, clipped gradient norm, fused AdamW."""
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    model_config, router_options = (
        dict(config),
        ({"output_router_logits": True} if "num_experts" in config else {}),
    )
    torch.manual_seed(0)
    transformers_config = AutoConfig.for_model(model_config.pop("model_type"), **model_config)
    model: Any = AutoModelForCausalLM.from_config(
        transformers_config, attn_implementation="sdpa", dtype=torch.float32
    )
    if parallel == "ddp":
        model = DistributedDataParallel(model)
    if parallel == "fsdp2":
        shard_layers(model, options.precision)
    adamw = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    ids, labels = batch(options, dist.get_rank(), sequences)
    is_cast = options.precision == "bf16" and parallel != "fsdp2"  # which has its own casts
    narrow = torch.autocast("cpu", torch.bfloat16) if is_cast else nullcontext()

    def turn() -> None:
        for _ in range(TURN):
            with narrow:
                out = model(input_ids=ids, use_cache=False, **router_options)
            loss = torch.nn.functional.cross_entropy(
                out.logits.float().flatten(0, 1), labels.flatten()
            )
            if router_options:
                loss = loss + config["router_aux_loss_coef"] * out.aux_loss
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adamw.step()
            adamw.zero_grad()

    return turn


def shard_layers(model: Any, precision: str) -> None:
    """Shard a model's layers and the model itself, as FSDP2's tutorial does."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half = torch.bfloat16 if precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def step_times(rounds: int, *steps: Step) -> list[list[tuple[float, float]]]:
    """Seconds of a step, and CPU seconds of it over all ranks, by round, of each of `steps`, in
    turn.
    """
    import torch
    import torch.distributed as dist

    by_step: list[list[tuple[float, float]]] = [[] for _ in steps]
    for round_ in range(rounds + 2):
        for number, step in sorted(enumerate(steps), reverse=bool(round_ % 2)):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            dist.barrier()
            seconds = time.perf_counter() - wall, time.process_time() - cpu
            step_seconds = torch.tensor(seconds, dtype=torch.float64) / TURN
            dist.all_reduce(step_seconds)
            if round_ > 1:  # the first one allocates
                by_step[number].append(
                    (float(step_seconds[0]) / dist.get_world_size(), float(step_seconds[1]))
                )
    return by_step


def ratios(
    name: str, our_times: list[tuple[float, float]], reference_times: list[tuple[float, float]]
) -> dict[str, float]:
    """Ratios of wall and of CPU seconds."""
    wall, cpu = (
        statistics.median(a[i] / b[i] for a, b in zip(our_times, reference_times, strict=True))
        for i in (0, 1)
    )
    return {
        name: round(wall, 3),
        f"cpu_{name}": round(cpu, 3),
        f"{name}_ours_s": round(statistics.median(w for w, _ in our_times), 4),
    }


def loop(options: argparse.Namespace) -> dict[str, float]:
    """One process."""
    from smtrain.worker.engine.native import init_distributed

    init_distributed("cpu")
    engine, step = native_step(options)
    our_times, reference_times = step_times(options.rounds, step, plain(options, options.sequences))
    return {
        "millions": round(engine.parameters / 1e6, 1),
        **ratios("over_loop", our_times, reference_times),
    }


def ddp(options: argparse.Namespace) -> dict[str, float]:
    """Two data-parallel processes."""
    from smtrain.worker.engine.native import init_distributed

    init_distributed("cpu")
    _, step = native_step(options, dp=2)
    our_times, reference_times = step_times(
        options.rounds, step, plain(options, options.sequences, parallel="ddp")
    )
    return ratios("over_ddp", our_times, reference_times)


def full(options: argparse.Namespace) -> dict[str, float]:
    """Two processes that divide weights, gradients and optimizer state."""
    from smtrain.worker.engine.native import init_distributed

    init_distributed("cpu")
    sharded_step, zero1_step = (
        native_step(options, dp=2, shard=shard)[1] for shard in ("full", "optimizer")
    )
    fsdp2_step = plain(options, options.sequences, parallel="fsdp2")
    our_times, zero1_times, fsdp2_times = step_times(
        options.rounds, sharded_step, zero1_step, fsdp2_step
    )
    return {
        **ratios("full_over_fsdp2", our_times, fsdp2_times),
        **ratios("full_over_zero1", our_times, zero1_times),
    }


def experts(
    options: argparse.Namespace, name: str = "experts", config: dict[str, Any] = MIXTURE
) -> dict[str, float]:
    """One process with a mixture of experts."""
    from smtrain.worker.engine.native import init_distributed

    init_distributed("cpu")
    _, step = native_step(options, config=config)
    our_times, reference_times = step_times(
        options.rounds, step, plain(options, options.sequences, config=config)
    )
    return ratios(f"{name}_over_loop", our_times, reference_times)


def expert_parallel(
    options: argparse.Namespace, name: str = "ep", config: dict[str, Any] = MIXTURE
) -> dict[str, Any]:
    """Two processes that divide the experts against two that each have all, and the places of the
    former's time.
    """
    from smtrain.worker.engine.native import init_distributed

    init_distributed("cpu")
    divided_step, whole_step = (
        native_step(options, dp=2, ep=ep, config=config)[1] for ep in (2, 1)
    )
    by_round: list[dict[str, float]] = []
    our_times, reference_times, _ = step_times(
        options.rounds,
        divided_step,
        whole_step,
        lambda: by_round.append(seconds_by_place(divided_step, config["num_hidden_layers"])),
    )
    places = {
        place: statistics.median(place_seconds[place] for place_seconds in by_round[2:])
        for place in by_round[0]
    }
    return {
        **ratios(f"{name}_over_dp", our_times, reference_times),
        f"{name}_places": _over_ranks(places),
    }


def seconds_by_place(turn: Step, layers: int) -> dict[str, float]:
    """Seconds of a step of this process by place: the engine's parts, with its all-to-alls by
    direction.
    """
    import torch.distributed as dist

    from smtrain.worker.engine.step_timing import StepTimer, mark_parts

    clock, send = StepTimer(), dist.all_to_all_single
    seconds: Any = clock.seconds
    seconds |= dict.fromkeys(("counts", "to experts", "from experts", "waiting"), 0.0)
    calls = 0

    def all_to_all(
        out: Any, x: Any, receive: Any = None, give: Any = None, group: Any = None
    ) -> Any:
        nonlocal calls
        place: Any = "waiting"
        with clock(place):
            dist.barrier(group)
        # Rows come in pairs: to the experts and back, and in the backward pass gradients of outputs
        # first.
        is_from_experts = calls % 2 == (calls % (4 * layers) < 2 * layers)
        place = "from experts" if is_from_experts else "to experts"
        if receive:
            calls += 1
        else:
            place = "counts"
        with clock(place):
            return send(out, x, receive, give, group)

    vars(dist).update(all_to_all_single=all_to_all)
    try:
        with mark_parts(clock):
            turn()
    finally:
        vars(dist).update(all_to_all_single=send)
    renamed_places = {
        "forward and backward": "other computing",
        "data parallel": "reducing gradients",
    }
    return {renamed_places.get(place, place): s / TURN for place, s in seconds.items() if s}


def _over_ranks(seconds: dict[str, float]) -> dict[str, float]:
    """The means over the processes."""
    import torch
    import torch.distributed as dist

    sums = torch.tensor([*seconds.values()], dtype=torch.float64)
    dist.all_reduce(sums)
    return {
        place: round(float(s) / dist.get_world_size(), 5)
        for place, s in zip(seconds, sums, strict=True)
    }


def tensor(options: argparse.Namespace) -> dict[str, float]:
    """Two processes that share every layer."""
    return compare_with_bound(options, "tp_over_bound", 1.0, tp=2)


def pipeline(options: argparse.Namespace) -> dict[str, float]:
    """Two stages."""
    return compare_with_bound(
        options, "pp_over_bound", (MICRO_BATCHES + 1) / MICRO_BATCHES, pp=2, cut=MICRO_BATCHES
    )


def compare_with_bound(
    options: argparse.Namespace, name: str, bubble: float, **cut: Any
) -> dict[str, float]:
    """Two processes against the bound; both run the part of one process at once, as in the step."""
    import torch.distributed as dist

    from smtrain.worker.engine.native import init_distributed

    init_distributed("cpu")
    _, step = native_step(options, **cut)
    with record_messages() as messages_to_send:
        step()
    # For one process, half of the batch is the same work as for each of the two.
    half = plain(options, options.sequences)

    def messages() -> None:
        for send_again in messages_to_send:
            send_again()

    our_times, half_times, gloo = step_times(options.rounds, step, half, messages)
    bound = [(a[0] * bubble + g[0], a[1] + g[1]) for a, g in zip(half_times, gloo, strict=True)]
    assert dist.get_world_size() == 2
    return ratios(name, our_times, bound)


@contextmanager
def record_messages() -> Iterator[list[Callable[[], object]]]:
    """Record the messages between processes, to send them again with other numbers of the same
    size.
    """
    import torch
    import torch.distributed as dist

    replays: list[Callable[[], object]] = []
    original_calls: tuple[Any, Any] = dist.all_reduce, dist.batch_isend_irecv

    def all_reduce(x: Any, *args: Any, **options: Any) -> Any:
        like = torch.zeros_like(x)
        replays.append(lambda: original_calls[0](like, *args, **options))
        return original_calls[0](x, *args, **options)

    def messages(ops: Any) -> Any:
        like = [dist.P2POp(op.op, torch.zeros_like(op.tensor), op.peer, op.group) for op in ops]
        replays.append(lambda: [work.wait() for work in original_calls[1](like)])
        return original_calls[1](ops)

    vars(dist).update(all_reduce=all_reduce, batch_isend_irecv=messages)
    try:
        yield replays
    finally:
        vars(dist).update(all_reduce=original_calls[0], batch_isend_irecv=original_calls[1])


PARTS: dict[str, tuple[int, Callable[[argparse.Namespace], dict[str, Any]]]]
PARTS = {
    "loop": (1, loop),
    "ddp": (2, ddp),
    "tp": (2, tensor),
    "pp": (2, pipeline),
    "full": (2, full),
}
PARTS |= {"experts": (1, experts), "ep": (2, expert_parallel)}
PARTS |= {
    "experts16": (1, partial(experts, name="experts16", config=MANY_EXPERTS)),
    "ep16": (2, partial(expert_parallel, name="ep16", config=MANY_EXPERTS)),
}


if __name__ == "__main__":
    main()
