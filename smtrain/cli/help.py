"""Help of the commands: examples, options in groups, and lines that fit the terminal.

The two tables are keyed by the words after `smtrain`. `options.app` makes commands of the classes below.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

EXAMPLES: dict[str, Sequence[tuple[str, str]]] = {
    "init": (
        ("smtrain init", "asks three questions"),
        (
            "smtrain init my-run.yaml --model hf://HuggingFaceTB/SmolLM2-135M --data texts/ --machines here",
            "asks nothing",
        ),
    ),
    "plan": (
        ("smtrain plan run.yaml", "the config as it is, and the five fastest meshes"),
        (
            "smtrain plan run.yaml --best --machines ml.trn1.32xlarge:8 --machines ml.trn1.32xlarge:16 --budget 5000",
            "the best way within a budget",
        ),
    ),
    "check": (
        ("smtrain check run.yaml", "all stages"),
        ("smtrain check run.yaml --target aws --stage train", "what AWS would refuse, for the train job"),
    ),
    "iam": (("smtrain iam policy run.yaml", "all three policies"),),
    "iam policy": (
        ("smtrain iam policy run.yaml --role", "the policy of the execution role"),
        ("smtrain iam policy run.yaml --trust", "who may take that role"),
    ),
    "run": (
        ("smtrain run run.yaml", "all stages; what is done is skipped"),
        ("smtrain run run.yaml --target aws --dry-run", "the requests that AWS would get; sends nothing"),
    ),
    "launch": (
        ("smtrain launch run.yaml --stage train", "one stage, followed to its end"),
        ("smtrain launch run.yaml --from-step 2000 --set train.lr=5e-5", "again from an earlier checkpoint"),
    ),
    "tune": (
        ("smtrain tune run.yaml --over train.lr=log:1e-5..1e-3 --max-jobs 8", "eight learning rates"),
        ("smtrain tune run.yaml --over train.seed=1,2,3 --to-the-end", "how much a seed changes"),
    ),
    "pipeline": (
        ("smtrain pipeline run.yaml", "the definition, as JSON"),
        ("smtrain pipeline run.yaml --start --name nightly", "create it on AWS, and start it"),
    ),
    "list": (
        ("smtrain list", "the newest 20 jobs here"),
        ("smtrain list --target aws --name llama --limit 50", "jobs on AWS, by name"),
    ),
    "status": (
        ("smtrain status my-run", "the run's job that runs, or its newest"),
        ("smtrain status my-run-train-1a2b3c4d --target aws", "one job on AWS"),
    ),
    "compare": (
        ("smtrain compare my-run other-run", "the verdict, and a table"),
        (
            "smtrain compare ours=my-run theirs=nemo/train.log --tokens-per-step 2097152 --out compare",
            "with another tool's log, as a page and a picture",
        ),
    ),
    "report": (("smtrain report my-run --out my-run.html", "a page to send to a colleague"),),
    "tensorboard": (
        ("smtrain tensorboard my-run", "on http://127.0.0.1:6006"),
        ("smtrain tensorboard my-run --out events", "only write the event files"),
    ),
    "logs": (
        ("smtrain logs my-run --follow", "until the job ends; Ctrl-C leaves it running"),
        ("smtrain logs my-run --host algo-2 --grep 'loss|error' --since 10m", "part of it"),
    ),
    "stop": (("smtrain stop my-run", "save a checkpoint, then stop"),),
    "download": (
        ("smtrain download my-run model", "the model, as a Hugging Face folder"),
        ("smtrain download my-run curves --what metrics", "what it measured, also for TensorBoard"),
    ),
    "chat": (
        ("smtrain chat my-run", "the model that a run exported"),
        ("smtrain chat my-run --compare demo://smollm2-135m", "both answer each question"),
    ),
    "generate": (
        ("smtrain generate my-run --prompt 'Once upon a time'", "one prompt, on the screen"),
        ("smtrain generate my-run prompts.txt --out texts.jsonl --temperature 0.7", "a prompt a line, into a file"),
    ),
    "serve": (
        ("smtrain serve my-run --port 8000", "OpenAI's API on this machine"),
        ("smtrain serve my-run --server vllm --option max-model-len=4096", "with an option of vLLM"),
    ),
    "push": (("smtrain push my-run my-name/my-model", "a private repository, unless --public"),),
    "register": (("smtrain register my-run --instance ml.g6e.xlarge --group my-models", "a version to approve"),),
    "deploy": (("smtrain deploy my-run --instance ml.g6e.xlarge --for 2h", "deleted after two hours"),),
    "undeploy": (("smtrain undeploy my-run", "endpoint, configuration and schedule"),),
    "convert": (
        ("smtrain convert model shards --to nxd --tp 8 --pp 4", "a Hugging Face folder, cut for 32 cores"),
        ("smtrain convert checkpoints model --to hf", "checkpoints of any kind, back to Hugging Face"),
    ),
    "checkpoint": (("smtrain checkpoint inspect checkpoints/step_1000", "kind, mesh, step and size"),),
    "checkpoint inspect": (("smtrain checkpoint inspect s3://bucket/run/checkpoints", "also afar"),),
    "checkpoint diff": (("smtrain checkpoint diff model-a model-b", "tensor by tensor"),),
    "checkpoint verify": (("smtrain checkpoint verify checkpoints/step_1000", "reads every byte"),),
    "image": (("smtrain image build run.yaml --print", "see the Dockerfile first"),),
    "image build": (
        ("smtrain image build run.yaml --tag my-image", "on this machine"),
        (
            "smtrain image build run.yaml --push 123456789012.dkr.ecr.us-west-2.amazonaws.com/smtrain:1",
            "and then to Amazon ECR",
        ),
    ),
    "image verify": (("smtrain image verify my-image --for run.yaml", "for the jobs of one config"),),
    "image pull": (("smtrain image pull public.ecr.aws/docker/library/python:3.12 --yes", "without asking"),),
    "image tiny": (("smtrain image tiny", "then: smtrain run run.yaml --docker --set local.image=smtrain-tiny"),),
    "images": (
        ("smtrain images --region eu-north-1", "the images of a region's registry"),
        ("smtrain images --engine native --json", "for a program"),
    ),
    "evaluate": (
        ("smtrain evaluate my-run --tasks hellaswag,arc_easy --limit 200", "a first look"),
        ("smtrain evaluate my-run --tasks mmlu --base demo://smollm2-135m --out scores", "before and after"),
    ),
    "data": (
        ("smtrain data report texts/", "look at the text first"),
        ("smtrain data prepare texts/ tokens --model demo://smollm2-135m", "then make tokens of it"),
    ),
    "data prepare": (
        (
            "smtrain data prepare texts/ tokens --model demo://smollm2-135m --validation-fraction 0.01",
            "with held-out text",
        ),
        (
            "smtrain data prepare 'crawl/*.jsonl' tokens --model model --text-column content --filter c4 --deduplicate",
            "cleaned on the way",
        ),
    ),
    "data merge": (("smtrain data merge tokens-a tokens-b all", "writes all.bin and all.idx"),),
    "data split": (("smtrain data split tokens part 98 1 1", "writes part_0, part_1 and part_2"),),
    "data inspect": (("smtrain data inspect tokens --model demo://smollm2-135m", "with its first words"),),
    "data report": (
        ("smtrain data report texts/ --out report.html", "a page on the text"),
        ("smtrain data report texts/ --against questions.jsonl --filter gopher_quality", "overlap, and what would go"),
    ),
    "data export": (("smtrain data export tokens blocks --seq-len 2048", "for datasets.load_from_disk"),),
    "data import": (("smtrain data import megatron/corpus tokens --model model", "corpus.bin and corpus.idx"),),
    "demo": (
        ("smtrain demo", "SmolLM2-135M, 270 MB to download"),
        ("smtrain demo --tiny", "a model from scratch, nothing to download"),
    ),
    "doctor": (
        ("smtrain doctor --json doctor.json", "what this machine has, to send with a question"),
        ("smtrain doctor --train --page doctor.html", "ten minutes of training on all its devices"),
    ),
    "config": (("smtrain config show run.yaml", "with all defaults"),),
    "config set": (("smtrain config set run.yaml train.lr=2e-4", "comments stay"),),
    "config schema": (("smtrain config schema > smtrain.schema.json", "for an editor"),),
    "config show": (("smtrain config show run.yaml --set train.lr=2e-4", "as --set leaves it"),),
    "cluster": (("smtrain cluster template run.yaml > cluster.yaml", "a file for ParallelCluster"),),
    "cluster network": (("smtrain cluster network run.yaml --zone us-west-2d > vpc.yaml", "VPC, subnets, gateways"),),
    "cluster template": (
        (
            "smtrain cluster template run.yaml --head-subnet subnet-1 --compute-subnet subnet-2 --key-name me > c.yaml",
            "with your own network",
        ),
    ),
    "cluster post-install": (("smtrain cluster post-install > neuron.sh", "to put on S3"),),
    "cluster clean": (
        ("smtrain cluster clean", "only look"),
        ("smtrain cluster clean --older-than 7d", "remove what is older"),
    ),
    "pool": (("smtrain pool list --target aws", "what they cost while they wait"),),
    "pool list": (("smtrain pool list --target aws", "what they cost while they wait"),),
    "pool release": (("smtrain pool release --all --target aws", "stop paying for all of them"),),
    "local": (("smtrain local clean", "what takes the disk; removes nothing"),),
    "local status": (("smtrain local status", "address, disk, and how to point other tools at it"),),
    "local env": (("smtrain local env", 'for a shell: eval "$(smtrain local env)"'),),
    "local stop": (("smtrain local stop", "the next command starts it again"),),
    "local clean": (
        ("smtrain local clean --older-than 7d", "jobs of finished runs; models stay"),
        ("smtrain local clean --run my-run --yes", "one run with all that it left, unasked"),
    ),
}
"""Example command lines, each with its purpose."""

_CONFIG = ("--set", "--target")
_START = (
    *("--stage", "--again", "--from-step", "--docker", "--yes", "--no-check"),
    *("--dry-run", "--upload", "--show-uploads"),
)
_SAMPLING = ("--max-new-tokens", "--temperature", "--top-k", "--top-p", "--stop", "--seed")
GROUPS: dict[str, dict[str, Sequence[str]]] = {
    "plan": {
        "The run": (*_CONFIG, "--model"),
        "What to choose among": ("--machines", "--machine-file", "--best", "--rank", "--budget", "--deadline"),
        "Numbers to go by": ("--prices", "--measured", "--probe"),
        "Output": ("--tokens", "--json"),
    },
    "iam policy": {
        "Which policy": ("--caller", "--role", "--trust"),
        "What else it must allow": ("--tune", "--endpoint", "--group", "--pipeline"),
        "The config": _CONFIG,
    },
    "run": {
        "The config": _CONFIG,
        "What is run": _START[1:6],
        "Look first, start nothing": _START[6:],
        "While it runs": ("--wait", "--plain", "--every"),
        "At the end": ("--download", "--overwrite"),
    },
    "launch": {
        "The config": _CONFIG,
        "What is run": _START[:6],
        "Look first, start nothing": _START[6:],
        "While it runs": ("--wait", "--plain", "--every"),
    },
    "tune": {
        "What is tried": ("--over", "--max-jobs", "--parallel", "--budget", "--early-stop"),
        "The config": _CONFIG,
        "Start and output": ("--dry-run", "--no-check", "--out"),
    },
    "logs": {
        "Which lines": ("--target", "--host", "--grep", "--since", "--tail"),
        "While it runs": ("--follow", "--resume", "--plain", "--every", "--lines"),
    },
    "chat": {
        "The model": ("--endpoint", "--compare", "--adapter", "--processes", "--config", "--target"),
        "What it is asked": ("--system", "--template", "--chat-template-kwargs", "--turns"),
        "How it answers": _SAMPLING,
    },
    "generate": {
        "The model": ("--adapter", "--processes", "--config", "--target"),
        "What it is asked": ("--prompt", "--chat", "--system", "--template", "--chat-template-kwargs"),
        "How it answers": (*_SAMPLING, "--beams", "--length-penalty"),
        "Output": ("--out", "--overwrite", "--batch", "--stream", "--json"),
    },
    "deploy": {
        "The endpoint": ("--name", "--instance", "--instances", "--for", "--max-length", "--detach"),
        "Its account": ("--role", "--schedule-role", "--image", "--target"),
    },
    "evaluate": {
        "What is asked": ("--tasks", "--data", "--text", "--lengths", "--limit"),
        "How it is asked": (
            "--num-fewshot",
            "--apply-chat-template",
            "--chat-template-kwargs",
            "--batch-size",
            "--run-generated-code",
        ),
        "Which models": ("--base", "--target"),
        "Output": ("--out", "--json", "--overwrite"),
    },
    "convert": {
        "What is written": ("--to", "--format", "--dtype", "--max-shard-size", "--overwrite"),
        "How it is cut": ("--tp", "--pp", "--cuts", "--qkv", "--kv-multiplier", "--kv-order"),
        "What is read": ("--config", "--merge-adapter", "--masters", "--reordered-qkv"),
        "Megatron and NeMo": (
            *("--spec", "--vpp", "--first-stage-layers", "--last-stage-layers", "--layers-per-stage"),
            *("--make-vocab-size-divisible-by", "--release"),
        ),
        "Older names": ("--xser",),
    },
    "data prepare": {
        "How the text is read": (
            *(
                "--format",
                "--text-column",
                "--map-keys",
                "--encoding",
                "--separator",
                "--max-bad",
                "--validation-split",
            ),
            "--json-keys",
        ),
        "What is left out or changed": (
            *("--unicode", "--strip-control", "--min-characters", "--deduplicate", "--near-duplicates", "--filter"),
            *("--pii", "--phone-region"),
        ),
        "Languages and text of tests": (
            "--fix-mojibake",
            "--language",
            "--language-model",
            "--decontaminate",
            "--decontaminate-column",
        ),
        "Tokens": (
            *(
                "--model",
                "--chat-template-kwargs",
                "--seq-len",
                "--objective",
                "--overlong",
                "--no-eod",
                "--shard-size",
            ),
        ),
        "Held-out text": ("--validation-fraction", "--validation-path"),
        "Running": ("--workers", "--overwrite", "--ray-address", "--max-crashed"),
    },
    "data report": {
        "How the text is read": ("--format", "--text-column", "--limit-mb"),
        "What is counted": ("--model", "--against", "--filter", "--near-duplicates", "--pii", "--phone-region"),
        "Languages": ("--fix-mojibake", "--language", "--language-model"),
        "Output": ("--out", "--overwrite"),
    },
    "cluster template": {
        "Network and access": ("--region", "--head-subnet", "--compute-subnet", "--key-name"),
        "Nodes": ("--os", "--ami", "--post-install", "--capacity-block", "--spot", "--storage"),
        "The config": ("--set",),
    },
}
"""Options of commands with many of them, by heading."""

_WHOLE = 1000  # characters, longer than any first sentence
_WORD = r"(?:'[^']*'|\S)+"

_HYPHEN = "\u2011"  # click breaks a line after any other, also inside `max-model-len`

MANY = 8
"""Longest list of options without groups."""


class Helped(TyperCommand):
    """A command whose help has examples and groups."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line, without redundant brackets."""
        return [_plain_word(piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options: in the groups of `GROUPS`, the rest below `Other options`."""
        groups = GROUPS.get(path_of(ctx), {})
        heading = {option: title for title, options in groups.items() for option in options}
        rest = "Other options" if groups else "Options"
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", *groups, rest)}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and param.param_type_name == "argument":
                rows["Arguments"].append(_plain_argument(*record))
            elif record is not None:
                title = next((heading[option] for option in param.opts if option in heading), rest)
                rows[title].append((_plain_type(record[0]), record[1]))
        for title, records in rows.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl([(name, text.replace("-", _HYPHEN)) for name, text in records])
        formatter.buffer[:] = [text.replace(_HYPHEN, "-") for text in formatter.buffer]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        _write_examples(ctx, formatter)


class HelpedGroup(TyperGroup):
    """A command with subcommands, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a row for each command; the text is wrapped, not cut."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            shown = [(name, command) for name, command in commands if command and not command.hidden]
            formatter.write_dl([(name, command.get_short_help_str(_WHOLE)) for name, command in shown])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        _write_examples(ctx, formatter)


def path_of(ctx: Any) -> str:
    """The words of a command, without `smtrain`."""
    return str(ctx.command_path).removeprefix("smtrain ")


def folded(command: str, width: int, indent: str) -> list[str]:
    """A command line in lines of `width` characters, an option next to its value, with a backslash at each fold."""
    lines, line = [], ""
    for word in re.findall(rf"--?\S+ (?!-){_WORD}|{_WORD}", command):
        if line and len(indent) + len(line) + len(word) + 3 > width:
            lines.append(f"{indent}{line} \\")
            line = f"  {word}"
        else:
            line = f"{line} {word}" if line else word
    return [*lines, f"{indent}{line}"]


def _write_examples(ctx: Any, formatter: Any) -> None:
    shown = EXAMPLES.get(path_of(ctx), ())
    if not shown:
        return
    with formatter.section("Examples"):
        for command, what_for in shown:
            indent = " " * formatter.current_indent
            formatter.write_text(f"# {what_for}")
            formatter.write("".join(f"{line}\n" for line in folded(command, formatter.width, indent)))


def _plain_word(piece: str) -> str:
    """`{CONFIG}` as CONFIG, and no second `...` after a name that has one."""
    piece = re.sub(r"\.\.\.([\]}])\.\.\.$", r"...\1", piece)
    return piece[1:-1] if re.fullmatch(r"\{[^{}|]*\}", piece) else piece


def _plain_type(record: str) -> str:
    """An option's name and type as a user would say it: a range is an int, a list takes one value at a time."""
    return re.sub(r"<list\[(\w+)\]>", r"<\1>", record).replace(" range>", ">")


def _plain_argument(name: str, text: str) -> tuple[str, str]:
    """An argument's name without its type; the usage line says whether it is required."""
    return re.sub(r" <[^>]*>$", "", name), text.removesuffix("[required]").rstrip()
