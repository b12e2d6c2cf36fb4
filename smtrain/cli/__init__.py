"""The command line: one module for each command, loaded when it is called.

`smtrain --help` reads the table below and imports nothing else, so it answers at once.
"""

from __future__ import annotations

import sys

# command -> (module that holds `app`, its help)
COMMANDS = {
    "help": (
        "smtrain.cli.manual",
        "Show a page of the documentation, such as `smtrain help slurm`, or list them.",
    ),
    "init": (
        "smtrain.cli.init",
        "Write a commented config, from three questions or three options.",
    ),
    "plan": (
        "smtrain.cli.plan",
        "Say before paying: does it fit, how fast, how long, how much, what is better.",
    ),
    "check": (
        "smtrain.cli.check",
        "Find every fault before it is paid for: quotas, role, buckets, image, data, limits.",
    ),
    "iam": (
        "smtrain.cli.iam",
        "`policy CONFIG` prints the least that caller and execution role must be allowed.",
    ),
    "run": (
        "smtrain.cli.run",
        (
            "Take a config through all its stages: prepare, convert, train, export, generate,"
            " evaluate."
        ),
    ),
    "launch": ("smtrain.cli.launch", "Start one stage of a config."),
    "tune": (
        "smtrain.cli.tune",
        "Train a config several times with other values, and say which are best.",
    ),
    "pipeline": (
        "smtrain.cli.pipeline",
        "Print a config's stages as a SageMaker pipeline; --upsert creates it.",
    ),
    "list": ("smtrain.cli.list_jobs", "List jobs, newest first."),
    "status": ("smtrain.cli.status", "Show a job: state, progress, checkpoints, failure."),
    "compare": (
        "smtrain.cli.compare",
        "Do trainings learn alike? Runs, jobs and other tools' logs, with a verdict.",
    ),
    "report": (
        "smtrain.cli.report",
        "Write a run as one HTML page: curves, validation, cost and waste, how to rerun.",
    ),
    "tensorboard": (
        "smtrain.cli.tensorboard",
        "Open TensorBoard on a run, with every new step while it trains.",
    ),
    "logs": (
        "smtrain.cli.logs",
        "Print what a job's hosts wrote; --follow continues until it ends.",
    ),
    "stop": ("smtrain.cli.stop", "Ask a job to save and stop."),
    "download": ("smtrain.cli.download", "Copy what a job produced into a folder."),
    "chat": ("smtrain.cli.chat", "Talk to a model on this machine, or compare the answers of two."),
    "generate": (
        "smtrain.cli.generate",
        "Let a model continue or answer prompts from files, to a file or the screen.",
    ),
    "serve": (
        "smtrain.cli.serve",
        "Serve a model on this machine by OpenAI's API (vLLM or transformers' server).",
    ),
    "push": ("smtrain.cli.push", "Upload an exported model to the Hugging Face hub."),
    "register": (
        "smtrain.cli.register",
        "Make an exported model a version in the SageMaker Model Registry.",
    ),
    "deploy": (
        "smtrain.cli.deploy",
        "Make a SageMaker endpoint of an exported model, for a while or to stay.",
    ),
    "undeploy": ("smtrain.cli.undeploy", "Delete an endpoint and what belongs to it."),
    "convert": (
        "smtrain.cli.convert",
        "Convert weights of any kind to NxD shards, a Hugging Face folder or our own.",
    ),
    "checkpoint": (
        "smtrain.cli.checkpoint",
        "`inspect`, `diff` or `verify` checkpoints of any kind.",
    ),
    "image": (
        "smtrain.cli.image",
        (
            "The image of your jobs: `build` one that installs nothing, `verify`, `pull`, or make a"
            " `tiny` one."
        ),
    ),
    "images": (
        "smtrain.cli.images",
        "List the Neuron training images, and which one a region's jobs get.",
    ),
    "evaluate": (
        "smtrain.cli.evaluate",
        "Judge a model by lm-evaluation-harness, before and after its training.",
    ),
    "data": (
        "smtrain.cli.data",
        "`report` on text; `prepare`, `merge`, `split`, `inspect`, `export`, `import` tokens.",
    ),
    "demo": (
        "smtrain.cli.demo",
        "SmolLM2-135M learns this machine's Python documentation: answers before and after.",
    ),
    "doctor": (
        "smtrain.cli.doctor",
        "Can this machine train, how well, and what is missing? A report to send.",
    ),
    "config": (
        "smtrain.cli.config",
        "`show` a config whole, `set` keys in its file, or print its JSON `schema` for editors.",
    ),
    "cluster": (
        "smtrain.cli.cluster",
        (
            "`network CONFIG` and `template CONFIG` print a Slurm cluster on AWS, `clean` frees its"
            " shared folder."
        ),
    ),
    "pool": (
        "smtrain.cli.pool",
        "`list` warm pools with their cost, `release` one, `extend` a training plan.",
    ),
    "local": (
        "smtrain.cli.local",
        "`status`, `env` or `stop` of the control plane on this machine; `clean` frees its disk.",
    ),
}


EXAMPLES = (
    ("smtrain demo", "a small model learns something, here, within minutes"),
    ("smtrain init my-run.yaml", "a config of your own"),
    ("smtrain run my-run.yaml", "all of its stages"),
)


def main() -> None:
    """Entry point of `smtrain`; user errors end with one sentence each and status 2."""
    argv = sys.argv[1:]
    try:
        if argv and argv[0] in COMMANDS:
            from smtrain.core.work import announce

            announce(argv)
            from smtrain.cli.dispatch import call

            sys.exit(call(argv[0], COMMANDS[argv[0]][0], argv[1:]))
        sys.exit(_without_command(argv))
    except KeyboardInterrupt:  # while dispatch itself was imported
        sys.exit(130)


def _without_command(argv: list[str]) -> int:
    import os

    try:
        if not argv or argv[0] in ("-h", "--help"):
            from smtrain.core.text import say

            say(_help())
            sys.stdout.flush()
            return 0
        if argv[0] == "--version":
            from smtrain.version import __version__

            print(f"smtrain {__version__}", flush=True)  # noqa: T201
            return 0
    except OSError as error:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or the interpreter's own flush would complain
        if isinstance(error, BrokenPipeError):
            return 0
        print(f"smtrain: {error.strerror}", file=sys.stderr)  # noqa: T201
        return 2
    from smtrain.cli.usage import unknown_command

    print(f"smtrain: {unknown_command(argv, COMMANDS)}", file=sys.stderr)  # noqa: T201
    return 2


def _help() -> str:
    lines = ["Usage: smtrain COMMAND [OPTIONS]", ""]
    lines += [
        (
            "Train an open LLM further on your own text, instructions or preferences, all weights or"
            " LoRA: here, on your GPUs, on Slurm or on AWS."
        ),
        "",
    ]
    lines += ["Commands:"]
    lines += [f"  {name:12} {text}" for name, (_, text) in COMMANDS.items()]
    lines += [
        "",
        "Examples:",
        *(line for command, what_for in EXAMPLES for line in (f"  # {what_for}", f"  {command}")),
    ]
    lines += [
        "",
        "`smtrain COMMAND --help` shows a command's options, `smtrain help` the documentation.",
    ]
    return "\n".join(lines)
