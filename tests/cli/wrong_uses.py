"""Wrong uses of every command, generated: what people mistype, misname, put in the wrong place or
leave out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.cli.commands import COMMANDS, GROUPS, calls, words

WITH_CONFIG = [name for name, command in COMMANDS.items() if command.needs == "config"]
FILES: dict[str, bytes] = {
    "list.yaml": b"- 1\n- 2\n",
    "text.yaml": b"just words\n",
    "empty.yaml": b"",
    "binary.yaml": b"\xff\xfe\x00\x80",
    "nul.yaml": b"model:\0 x\n",
    "tabs.yaml": b"model:\n\tpath: x\n",
    "unclosed.yaml": b'model: {path: "x\n',
    "twice.yaml": b"model: {path: x}\nmodel: {path: y}\n",
    "itself.yaml": b"a: &a [*a]\n",
    "deep.yaml": b"model: " + b"[" * 3000 + b"]" * 3000 + b"\n",
    "unknown.yaml": b"modell: {path: x}\n",
    "no-model.yaml": b"data: {path: text}\n",
    "lost-model.yaml": b"model: {path: nowhere}\ndata: {path: text}\n",
    "tag.yaml": b"model: !!python/object/apply:os.system ['true']\n",
    "number-key.yaml": b"1: 2\nmodel: {path: model}\n",
}
SETS = [
    "train.lr=.inf",
    "train.lr=.nan",
    "train.lr=-1",
    "train.lr=fast",
    "train.steps=true",
    "train.steps=100000000000000000000",
    "train.steps=1.5",
    "train.seq_len=1000000",
    "train.betas=[0.9]",
    "train.precision=int4",
    "train.engine=cuda",
    "train.objective=rl",
    "compute.max_run=0",
    "compute.max_run=29d",
    "compute.instance_type=ml.trn9.huge",
    "compute.instance_type=laptop",
    "compute.instance_count=0",
    "compute.instance_count=100000",
    "compute.price_limit=-1",
    "compute.price_limit=.nan",
    "compute.role=not a role",
    "compute.region=the moon",
    "parallel.tp=3",
    "parallel.tp=0",
    "parallel.pp=99",
    "parallel.dp=7",
    "name=a b",
    "name=",
    "name=" + "x" * 80,
    "output.s3_uri=s3://My_Bucket/x",
    "output.s3_uri=bucket/x",
    "model.path=nowhere",
    "model.path=meta-llama/Llama-3.2-1B",
    "model.path=run.yaml",
    "data.path=nowhere",
    "data.prepared=text",
    "train",
    "=1",
    "train.=1",
    "train.lrr=1",
    "nothing.at.all=1",
    "train.steps.more=1",
    "checkpoint.keep=0",
    "tags=1",
    "generate.temperature=-1",
    "network.subnets=[subnet-1]",
    "data.max_bad=-1",
    "target=moon",
    "model=[",
]
NAMES = [
    "",
    " ",
    "a b",
    "../x",
    "-x-",
    "x" * 64,
    "jöb",
    "arn:aws:sagemaker:moon",
    "s3://a/b",
    "no-such-job",
    "a\nb",
]


@dataclass(frozen=True)
class Use:
    """The words of a call, and a part of its sentence."""

    words: tuple[str, ...]
    said: str = ""

    @property
    def label(self) -> str:
        return (
            " ".join(word if len(word) < 40 else f"{word[:12]}..." for word in self.words)
            .encode("unicode_escape")
            .decode()
        )


def world(folder: Path, raw: dict[str, Any]) -> None:
    """Write the folder of the wrong uses: a valid config, a model, text, and files that are invalid
    as any of them.
    """
    (folder / "run.yaml").write_text(yaml.safe_dump(raw))
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    for name in (
        "an-empty-folder",
        "hidden",
        "pictures",
        "mixed",
        "broken-model",
        "list-model",
        "a-dataset",
        "taken",
    ):
        (folder / name).mkdir()
    (folder / "hidden/.x").write_text("x")
    (folder / "pictures/a.jsonl").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\xff" * 50)
    (folder / "pictures.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\xff" * 50)
    (folder / "mixed/a.xyz").write_bytes(b"\0\1\2")
    (folder / "broken-model/config.json").write_text("{")
    (folder / "list-model/config.json").write_text("[1]")
    (folder / "a-dataset/manifest.json").write_text(json.dumps({"format_version": 99}))
    (folder / "taken/manifest.json").write_text("{}")
    (folder / "taken.bin").write_bytes(b"")
    (folder / "empty.jsonl").write_text("")
    (folder / "bad.jsonl").write_text('{"txt": 1}\nnot json\n')


def of_the_command_line() -> Iterator[Use]:
    """Unknown commands and options, too many or too few words, values of a wrong type."""
    for word in ("strt", "Plan", "--verbose", "-x", "", "plan.yaml", "trian"):
        yield Use((word,))
    for group in GROUPS:
        yield Use((group,), "missing command")
        yield Use((group, "nothing"), "no such command")
    for name, command in COMMANDS.items():
        yield Use((*words(name, command.works), "--no-such-option"), "no such option")
        if not command.any_number:
            yield Use(
                (*words(name, command.works), "one", "word", "too", "many"),
                "unexpected extra argument",
            )
        if command.works:
            yield Use(words(name, ""), "missing argument")
            yield Use(words(name, command.works)[:-1] if name not in ("launch", "run") else (name,))
    for name, call in calls("wrong"):
        yield Use(words(name, call))


def of_configs(every: bool) -> Iterator[Use]:
    """Without `every`, each file and each setting with one command, and each command with some
    files.
    """
    files = [*FILES, "nowhere.yaml", "an-empty-folder", "", "model/config.json", "text/a.jsonl"]
    for n, name in enumerate(WITH_CONFIG):
        dry = ["--dry-run"] if "--dry-run" in COMMANDS[name].works else []
        for file in files if every else files[n :: len(WITH_CONFIG)]:
            if (name, file) == ("check", "model/config.json"):
                continue  # `check` takes the config of a model too
            yield Use((*name.split(), file, *dry))
    for n, text in enumerate(SETS):
        for name in ("run", "plan") if every else ("run", "plan")[n % 2 :][:1]:
            if name == "plan" and text.startswith("target="):
                continue  # a plan has its own target
            yield Use((name, "run.yaml", *(["--dry-run"] if name == "run" else []), "--set", text))
    for text in (
        "data.path=an-empty-folder",
        "data.path=hidden",
        "data.path=pictures",
        "data.path=pictures.png",
        "data.path=empty.jsonl",
        "data.path=mixed",
        "model.path=broken-model",
        "model.path=list-model",
        "model.path=text",
        "data.prepared=a-dataset",
        "data.path=model",
        "model.path=an-empty-folder",
    ):
        for more in (
            ["run", "run.yaml"],
            ["launch", "run.yaml", "--stage", "prepare"],
            ["run", "run.yaml", "--dry-run"],
        ):
            yield Use((*more, "--set", text))


def of_jobs() -> Iterator[Use]:
    for job in NAMES:
        for call in (
            ["status", job],
            ["logs", job],
            ["stop", job],
            ["download", job, "to"],
            ["pool", "release", job],
            ["report", job],
            ["tensorboard", job, "--out", "to"],
        ):
            yield Use(tuple(call))
    for folder in ("", " ", "run.yaml"):
        yield Use(("download", "no-such-job", folder))
    yield Use(("download", "no-such-job", "to", "--what", "money"))
    for out in ("", "text"):
        yield Use(("report", "no-such-run", "--out", out))
    for more in (
        ["--port", "x"],
        ["--port", "-1"],
        ["--port", "70000"],
        ["--out", ""],
        ["--out", "run.yaml"],
    ):
        yield Use(("tensorboard", "no-such-run", *more))


def of_checkpoints() -> Iterator[Use]:
    for source in (
        "nowhere",
        "",
        "an-empty-folder",
        "run.yaml",
        "broken-model",
        "list-model",
        "text",
        "gs://a/b",
    ):
        yield Use(("convert", source, "to", "--to", "nxd"))
        yield Use(("checkpoint", "inspect", source))
        yield Use(("checkpoint", "verify", source))
        yield Use(("checkpoint", "diff", source, "model"))
    for more in (
        ["--to", "gguf"],
        ["--to", ""],
        ["--to", "nxd", "--tp", "0"],
        ["--to", "nxd", "--tp", "3"],
        ["--to", "nxd", "--pp", "99"],
        ["--to", "nxd", "--format", "zip"],
        ["--to", "nxd", "--qkv", "joined"],
        ["--to", "nxd", "--kv-order", "x"],
        ["--to", "nxd", "--kv-multiplier", "0"],
        ["--to", "nxd", "--cuts", "a,b"],
        ["--to", "nxd", "--cuts", "1", "--pp", "3"],
        ["--to", "hf", "--dtype", "int4"],
        ["--to", "hf", "--max-shard-size", "big"],
        ["--to", "hf", "--max-shard-size", "0"],
        ["--to", "hf", "--config", "nowhere"],
        ["--to", "hf", "--config", ""],
        ["--to", "megatron", "--form", "xser"],
        ["--to", "nxd", "--form", "torch"],
        ["--to", "hf", "--form", "pt"],
        ["--to", "megatron", "--tp", "3"],
        ["--to", "megatron", "--pp", "99"],
        ["--to", "megatron", "--spec", "x"],
        ["--to", "megatron", "--layers-per-stage", "a"],
        ["--to", "megatron", "--pp", "2", "--layers-per-stage", "1"],
        ["--to", "nemo-megatron", "--release", "9"],
        ["--to", "nemo-megatron", "--form", "torch"],
        ["--to", "megatron", "--vpp", "99"],
        ["--to", "megatron", "--first-stage-layers", "99"],
        ["--to", "peft"],
        ["--to", "hf", "--merge-adapter", "nowhere"],
        ["--to", "hf", "--merge-adapter", ""],
        ["--to", "hf", "--merge-adapter", "model"],
        ["--to", "peft", "--merge-adapter", "model"],
    ):
        yield Use(("convert", "model", "to", *more))
    for target in ("", "model", "model/below", "run.yaml", "run.yaml/below"):
        yield Use(("convert", "model", target, "--to", "nxd"))
    yield Use(("checkpoint", "inspect", "model", "--config", "nowhere"))


def of_data() -> Iterator[Use]:
    for source in (
        "nowhere",
        "",
        "an-empty-folder",
        "hidden",
        "mixed",
        "empty.jsonl",
        "bad.jsonl",
        "pictures.png",
        "gs://a",
    ):
        yield Use(("data", "prepare", source, "to", "--model", "tokenizer"))
    for more in (
        ["--model", "nowhere"],
        ["--model", ""],
        ["--model", "broken-model"],
        ["--model", "text"],
        ["--model", "tokenizer", "--seq-len", "0"],
        ["--model", "tokenizer", "--seq-len", "x"],
        ["--model", "tokenizer", "--format", "pdf"],
        ["--model", "tokenizer", "--unicode", "utf9"],
        ["--model", "tokenizer", "--objective", "rl"],
        ["--model", "tokenizer", "--overlong", "x"],
        ["--model", "tokenizer", "--workers", "0"],
        ["--model", "tokenizer", "--max-bad", "-1"],
        ["--model", "tokenizer", "--min-characters", "-1"],
        ["--model", "tokenizer", "--seq-len", "4096"],
        ["--model", "tokenizer", "--text-column", "nothing"],
        ["--model", "tokenizer", "--separator", "\\x"],
    ):
        yield Use(("data", "prepare", "text", "to", *more))
    for out in ("", " ", "run.yaml", "run.yaml/below", "taken"):
        yield Use(("data", "prepare", "text", out, "--model", "tokenizer", "--seq-len", "1"))
        yield Use(("data", "import", "taken", out, "--model", "tokenizer"))
    for more in (
        ["nowhere"],
        [""],
        ["empty.jsonl"],
        ["text", "--out", ""],
        ["text", "--out", "taken"],
        ["text", "--out", "no/p"],
        ["text", "--out", "run.yaml"],
        ["text", "--format", "pdf"],
        ["text", "--limit-mb", "0"],
        ["text", "--model", "nowhere"],
        ["text", "--against", "nowhere"],
    ):
        yield Use(("data", "report", *more))
        yield Use(("data", "export", "taken", out))
    for dataset in ("nowhere", "", "an-empty-folder", "a-dataset", "run.yaml", "text", "taken"):
        yield Use(("data", "inspect", dataset))
        yield Use(("data", "merge", dataset, "to"))
        yield Use(("data", "split", dataset, "to", "1", "1"))
        yield Use(("data", "export", dataset, "to"))
        yield Use(("data", "import", dataset, "to", "--model", "tokenizer"))
    for call in (["inspect"], ["merge", "a"], ["export"]):
        last = ["to"] if call != ["inspect"] else []
        yield Use(("data", *call, "s3://bucket/tokens", *last), "not a folder of this machine")
    for call in (
        ["split", "a", "to", "1"],
        ["split", "a", "to", "0", "1"],
        ["split", "a", "to", "x", "1"],
        ["split", "a", "to", "nan", "1"],
        ["split", "a", "to", "--", "-1", "1"],
        ["merge", "a"],
        ["merge", "a", "taken"],
        ["split", "a", "", "1", "1"],
        ["merge", "a", ""],
        ["export", "a", "to", "--seq-len", "0"],
    ):
        yield Use(("data", *call))


def of_talks() -> Iterator[Use]:
    for model in (
        "nowhere",
        "./nowhere",
        "",
        "an-empty-folder",
        "run.yaml",
        "model",
        "broken-model",
        "list-model",
        "text",
        "no-such-run",
        "a b",
        "demo://nothing",
        "taken",
    ):
        yield Use(("chat", model))
        yield Use(("serve", model, "--server", "transformers"))
        yield Use(("chat", "tokenizer", "--compare", model))
        yield Use(("generate", model, "--prompt", "x"))
        yield Use(("generate", "tokenizer", "--prompt", "x", "--adapter", model))
    for more in (
        ["--temperature", "-1"],
        ["--temperature", "hot"],
        ["--top-p", "0"],
        ["--top-p", "2"],
        ["--top-k", "-1"],
        ["--max-new-tokens", "0"],
        ["--seed", "-1"],
        ["--stop", ""],
        ["--temperature", "0", "--top-k", "5"],
        ["--target", "moon"],
    ):
        yield Use(("chat", "model", *more))
        yield Use(("generate", "model", "--prompt", "x", *more))
    for more in (
        [],
        ["nowhere.txt"],
        ["text"],
        ["an-empty-folder"],
        ["empty.jsonl"],
        ["bad.jsonl"],
        ["pictures.png"],
        ["--prompt", ""],
        ["--prompt", "x", "--batch", "0"],
        ["--prompt", "x", "--beams", "0"],
        ["--prompt", "x", "--length-penalty", "2"],
        ["--prompt", "x", "--stream", "--batch", "2"],
        ["--prompt", "x", "--stream", "--json"],
        ["--prompt", "x", "--system", "y"],
        ["--prompt", "x", "--out", "run.yaml"],
        ["--prompt", "x", "--out", "text"],
        ["--prompt", "x", "--out", "nowhere/out.jsonl"],
        ["--prompt", "x", "--out", ""],
    ):
        yield Use(("generate", "model", *more))
    yield Use(("chat", "model", "--turns", "-1"))
    yield Use(("chat", "model", "--endpoint", "llama"), "leave one of the two out")
    for name in ("", "a b", "x" * 64, "-x"):
        yield Use(("chat", "--endpoint", name), "cannot be the name of an endpoint")
    for name in NAMES:
        yield Use(("undeploy", name, "--target", "local"))
        yield Use(("register", name, "--instance", "ml.g6e.xlarge", "--target", "local"))
        yield Use(("deploy", name, "--instance", "ml.g6e.xlarge", "--target", "local"))
    for more in (["--for", "soon"], ["--for", "1m"], ["--instances", "0"], ["--max-length", "-1"]):
        yield Use(("deploy", "no-such-run", "--instance", "ml.g6e.xlarge", *more))
    for name in (
        "llama",
        "me/",
        "/llama",
        "me/llama/three",
        "me llama/x",
        "https://huggingface.co/me/llama",
        "",
    ):
        yield Use(("push", "model", name))
    for over, said in (
        ("train.lr", "must look like"),
        ("train.lr=2..1", "must go up"),
        ("train.lrr=1,2", "no key train.lrr"),
        ("compute.instance_count=1,2", "only keys of train"),
        ("train.seq_len=8,16", "stage prepare makes"),
    ):
        yield Use(("tune", "run.yaml", "--over", over), said)
    for call, said in (
        ([], "--over"),
        (["--max-jobs", "0"], "--max-jobs"),
        (["--max-jobs", "1"], "2 combinations"),
        (["--parallel", "0"], "--parallel"),
        (["--budget", "nan"], "--budget"),
        (["--budget", "0.01"], "the budget of"),
        (["--out", "run.yaml"], "run.yaml is a file"),
    ):
        yield Use(
            ("tune", "run.yaml", *(["--over", "train.lr=1e-4,2e-4"] if call else []), *call), said
        )
    for more in (["--port", "0"], ["--port", "x"], ["--server", "tgi"], ["--option", "=1"]):
        yield Use(("serve", "tokenizer", *more))


def of_the_issue() -> Iterator[Use]:
    """Observed mistakes of newcomers, with the words of each answer.

    Cases that need a job, a full disk or AWS are in tests/cli/test_places_to_write.py,
    tests/plane/test_full_disk.py, tests/client/launch/test_downloads.py,
    tests/cli/test_unreachable.py and tests/cli/test_edge.py.
    """
    for key in ("lr", "min_lr", "eps", "weight_decay", "grad_clip", "stall_minutes"):
        yield Use(
            ("run", "run.yaml", "--dry-run", "--set", f"train.{key}=.inf"), f"train.{key}: got inf"
        )
    neuron = "1.dkr.ecr.us-west-2.amazonaws.com/own:neuronx-sdk2.30.0"
    gpu = "1.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.10.0-gpu-py313-cu130-ubuntu22.04-sagemaker"
    for machine, image, said in (
        ("ml.p5.48xlarge", neuron, "this image is for Neuron cores, and ml.p5.48xlarge has GPUs"),
        (
            "ml.trn2.48xlarge",
            neuron,
            "this image has Neuron 2.30.0, and engine native needs TorchNeuron",
        ),
        ("ml.p5.48xlarge", gpu, "has no transformers, which every stage imports"),
    ):
        settings = ("target=aws", f"compute.instance_type={machine}", f"compute.image={image}")
        yield Use(
            ("run", "run.yaml", "--dry-run", *(w for text in settings for w in ("--set", text))),
            said,
        )
    for text, said in (
        ("train.betas=[.inf, 0.9]", "train.betas"),
        ("train.betas=[0.9]", "it has too few numbers"),
        ("train.steps=100000000000000000000", "the number is too large"),
        ("train.steps=true", "a number is needed here"),
        ("train.lr=true", "train.lr: got True"),
        ("compute.max_run=0", "compute.max_run: got 0"),
        ("compute.instance_type=ml.trn9.huge", "ml.trn9.huge"),
        ("train.seq_len=100000", "positions"),
        ("compute.price_limit=-1", "compute.price_limit: got -1"),
        ("compute.price_limit=.nan", "compute.price_limit: got nan"),
        ("compute.role=not a role", "not a role's ARN"),
        ("output.s3_uri=s3://My_Bucket/x", "cannot be a bucket's name"),
        ("data.prepared=./text", "holds no manifest.json"),
        ("data.path=pictures", "data.path"),
        ("compute.instance_count=100000", "compute.instance_count: got 100000"),
        (
            "model.path=meta-llama/Llama-3.2-1B",
            "a model of the hub is hf://meta-llama/Llama-3.2-1B",
        ),
        ("model.path=list-model", "config.json is a list"),
        ("data.path=mixed", "holds no file of text that can be read"),
        ("data.path=hidden", "holds no file of text that can be read"),
        ("network.subnets=[subnet-1]", "network."),
        ("tags={aws:a: b}", "tags"),
        ("compute.max_run=29d", "compute.max_run: got 2505600"),
        ("target=moon", "target: got 'moon'"),
    ):
        yield Use(("run", "run.yaml", "--dry-run", "--set", text), said)
    for call, said in (
        (["plan", "run.yaml", "--budget", "-1"], "--budget"),
        (["plan", "run.yaml", "--budget", "nan"], "--budget"),
        (["plan", "twice.yaml"], "'model' is written twice"),
        (["plan", "itself.yaml"], "alias to itself"),
        (["plan", "binary.yaml"], "is not a text file"),
        (["status", ""], "'' cannot be a job's name"),
        (
            [
                "run",
                "run.yaml",
                "--target",
                "aws",
                "--dry-run",
                "--set",
                "compute.role=notarole",
                "--set",
                "compute.region=us-east-1",
            ],
            "IAM did not return the ARN of the role 'notarole'",
        ),
        (["plan", "run.yaml", "--set", "train.engine=native"], "train.engine"),
        (
            ["data", "prepare", "bad.jsonl", "to", "--model", "tokenizer", "--max-bad", "5"],
            "all 2 lines are bad",
        ),
        (
            ["data", "prepare", "text", "to", "--model", "tokenizer", "--seq-len", "4096"],
            "lower --seq-len",
        ),
        (
            ["data", "prepare", "text", "run.yaml", "--model", "tokenizer"],
            "run.yaml is a file; name a folder",
        ),
        (["download", "no-such-job", ""], "FOLDER is an empty name"),
        (["convert", "model", "model", "--to", "nxd"], "overlap"),
        (
            ["init", "run.yaml", "--model", "model", "--data", "text", "--machines", "here"],
            "run.yaml",
        ),
        (
            ["init", "text", "--model", "model", "--data", "text", "--machines", "here"],
            "text is a folder; name a file, such as text/smtrain.yaml",
        ),
        (["status", "run.yaml"], "it is a config, whose run is"),
        (["chat", "run.yaml"], "it is a config, whose run is"),
        (
            ["data", "prepare", "pictures.png", "to", "--model", "tokenizer"],
            "is not text; it looks",
        ),
        (["data", "inspect", "text"], "give the output of stage prepare, or of `smtrain data"),
    ):
        yield Use(tuple(call), said)


def uses(every: bool = True) -> list[Use]:
    """Every wrong use, once; or some of each kind."""
    all_uses = [
        *of_the_issue(),
        *of_the_command_line(),
        *of_configs(every),
        *of_jobs(),
        *of_checkpoints(),
        *of_data(),
        *of_talks(),
    ]
    return list(dict.fromkeys(all_uses))
