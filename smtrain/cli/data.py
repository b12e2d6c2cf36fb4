"""`smtrain data report|prepare|merge|split|inspect|export|import`."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Optional

import typer

from smtrain.cli import options
from smtrain.cli.chat import TemplateOptions
from smtrain.cli.data_keys import JsonKeys, MapKeys, one_key, read_column_map
from smtrain.cli.data_options import (
    FLAGS,
    KeyOptions,
    config_of,
    refuse_without_effect,
    require_name,
)
from smtrain.cli.data_report import report
from smtrain.cli.dispatch import register_flags
from smtrain.core.config.schema import other_inputs, with_inputs
from smtrain.core.errors import ConfigError
from smtrain.core.model.chat_options import read_options
from smtrain.core.model.hf_folder import folder_of
from smtrain.core.text import room, say

app = options.app("""Text as tokens: look at it, tokenize it, and handle datasets of tokens.

    $ smtrain data report texts/  # look at the text first
    $ smtrain data prepare texts/ tokens --model demo://smollm2  # then make tokens of it
    """)
DATASET = "A prepared folder, or the PREFIX of a Megatron pair PREFIX.bin and PREFIX.idx."
Dataset = Annotated[str, typer.Argument(metavar="DATASET", help=DATASET, show_default=False)]
Out = Annotated[str, typer.Argument(metavar="OUT", help="What to write.", show_default=False)]
Model = Annotated[
    str,
    typer.Option(
        "--model", help="Folder with the model's tokenizer, or demo://.", show_default=False
    ),
]
SeqLen = Annotated[int, typer.Option("--seq-len", min=1, help="Tokens per sequence.")]


@app.command(
    groups={
        "How the text is read": (
            "--format --text-column --map-keys --encoding --separator --max-bad --validation-split"
            " --json-keys"
        ),
        "What is left out or changed": (
            "--unicode --strip-control --min-characters --deduplicate --near-duplicates --filter"
            " --pii --phone-region"
        ),
        "Languages and text of tests": (
            "--fix-mojibake --language --language-model --decontaminate --decontaminate-column"
        ),
        "Tokens": (
            "--model --chat-template-kwargs --seq-len --objective --overlong --no-eod --shard-size"
        ),
        "Held-out text": "--validation-fraction --validation-path",
        "Running": "--workers --overwrite --ray-address --max-crashed",
    },
)
def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT...", help="Files, folders, globs, s3://, hf:// or demo://."),
    ],
    output: Out,
    model: Model,
    keys: KeyOptions,
    json_keys: JsonKeys = None,
    map_keys: MapKeys = None,
    chat_template_kwargs: TemplateOptions = None,
    no_eod: Annotated[
        bool, typer.Option("--no-eod", help="Append no end-of-document token.")
    ] = False,
    validation_fraction: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            help="Hold out this share of the documents for validation, e.g. 0.01.",
            show_default=False,
        ),
    ] = None,
    validation_path: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Other text to validate on.", show_default=False),
    ] = None,
    validation_split: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="--format megatron: training, validation and test, e.g. 980,10,10.",
            show_default=False,
        ),
    ] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Tokenize text; run it again to resume after an interruption.

    $ smtrain data prepare texts/ tokens --model demo://smollm2 --validation-fraction 0.01  # with held-out text
    $ smtrain data prepare 'crawl/*.jsonl' tokens --model model --text-column content --filter c4 --deduplicate
        # cleaned on the way
    """
    register_flags(FLAGS)
    keys.text_column = one_key(json_keys, keys.text_column)
    held_out = {"fraction": validation_fraction, "path": validation_path, "split": validation_split}
    config = config_of(
        model,
        vars(keys),
        data={"columns": read_column_map(map_keys, keys.objective)},
        train=(
            {"validation": held_out}
            if any(value is not None for value in held_out.values())
            else {}
        ),
        template=read_options("--chat-template-kwargs", chat_template_kwargs),
    )
    refuse_without_effect(config, no_eod)
    options.folder_of("OUT", output)
    for word in inputs:
        require_name("INPUT", word)
    for key, _, path in other_inputs(config):
        require_name(FLAGS[key], path)
    require_name("--model", model)
    inputs, model = [options.resolve_folder(word) for word in inputs], options.model_folder(model)
    config = with_inputs(config, lambda _, path: options.resolve_folder(path))
    from smtrain.worker.data.prepare.prepare import prepare as prepare_text
    from smtrain.worker.data.prepare.sft import prepare_sft
    from smtrain.worker.data.prepare.spread.driver import Spread
    from smtrain.worker.data.prepare.spread.on_ray import RayExecutor
    from smtrain.worker.data.prepare_options import PrepareOptions

    prepare_dataset = prepare_text if config.train.objective == "pretrain" else prepare_sft
    with ExitStack() as stack:
        spread = None
        if address := config.data.ray_address:
            executor = stack.enter_context(RayExecutor(address, ships_code=True, on_loss=_end))
            spread = Spread(executor, max_crashed=config.data.max_crashed)
        prepare_options = PrepareOptions.of(config, append_eod=not no_eod, overwrite=overwrite)
        dataset = prepare_dataset(inputs, Path(output), Path(model), prepare_options, spread=spread)
    from smtrain.core.protocol.prepared import size_words
    from smtrain.worker.data.read.ignored_fields import ignored_text_sentence

    say(f"{output}: {dataset.documents:,} documents, {size_words(vars(dataset))}")
    say(f"tokenized by {dataset.tokenized_by}")
    if dataset.validation:
        held_out = dataset.validation
        say(
            f"held out for validation: {held_out['documents']:,} documents, {held_out['tokens']:,}"
            " tokens"
        )
    for reason, count in dataset.dropped.items():
        say(f"left out: {count:,} {reason}")
    for note, count in dataset.noted.items():
        say(f"found: {count:,} {note}")
    if dataset.unread:
        say(ignored_text_sentence(dataset.unread))
    for line in dataset.bad_lines:
        say(f"skipped: {line}")


def _end(sentence: str) -> None:
    """End the process, whose main thread may be blocked, with an error."""
    say(f"smtrain: {sentence}", error=True)
    os._exit(2)


@app.command()
def merge(
    datasets: Annotated[list[str], typer.Argument(metavar="DATASET...", help=DATASET)],
    output: Annotated[
        str,
        typer.Argument(
            metavar="PREFIX",
            help="Prefix of the pair of files to write; for instruction data a prepared folder.",
        ),
    ],
    overwrite: options.Overwrite = False,
) -> None:
    """Append datasets to one another.

    $ smtrain data merge tokens-a tokens-b all  # writes all.bin and all.idx
    """
    register_flags(FLAGS)
    for name in [*datasets, output]:
        require_name("DATASET or PREFIX", name)
    from smtrain.worker.data.manifest import is_marked
    from smtrain.worker.data.pack import exchange

    folders = [Path(folder_of(name)) for name in datasets]
    prefixes_by_folder = [exchange.prefixes(folder, answers=True) for folder in folders]
    pairs = [pair for parts in prefixes_by_folder for shards in parts for pair in shards]
    if any(map(is_marked, pairs)):
        if pair_prefix := next((folder for folder in folders if not folder.is_dir()), None):
            raise ConfigError(
                f"{pair_prefix}: a pair without its prepared folder has no marks of answers, or only a"
                " part of them; name folders that `smtrain data prepare` wrote with one"
                " --objective",
                code="config.wrong_value",
            )
        dataset = exchange.merge_marked(folders, Path(output), overwrite=overwrite)
        documents, held_out_count = (
            dataset.documents,
            dataset.validation["documents"] if dataset.validation else 0,
        )
    else:
        held_out_pairs = [pair for folder in folders for pair in exchange.held_out(folder)]
        documents, held_out_count = exchange.merge(
            pairs, Path(output), held_out_pairs, overwrite=overwrite
        )
    say(f"{output}: {documents:,} documents")
    if held_out_count:
        say(f"held out for validation: {held_out_count:,} documents")


@app.command()
def split(
    dataset: Dataset,
    output: Annotated[
        str,
        typer.Argument(
            metavar="PREFIX", help="Prefix of the parts to write, PREFIX_0, PREFIX_1..."
        ),
    ],
    shares: Annotated[
        list[float],
        typer.Argument(metavar="SHARE...", help="Share of the tokens of each part, e.g. 98 1 1."),
    ],
    overwrite: options.Overwrite = False,
) -> None:
    """Split a dataset between documents, in order.

    $ smtrain data split tokens part 98 1 1  # writes part_0, part_1 and part_2
    """
    register_flags(FLAGS)
    require_name("DATASET", dataset)
    require_name("PREFIX", output)
    from smtrain.worker.data.pack import exchange

    folder = Path(folder_of(dataset))
    prefixes = exchange.prefixes(folder)
    if len(prefixes) != 1:
        raise ConfigError(
            f"{dataset} has {len(prefixes)} parts; merge them first, or name one of their prefixes",
            code="config.wrong_value",
        )
    for part in exchange.split(prefixes[0], Path(output), shares, overwrite=overwrite):
        say(part)
    if note := exchange.held_out_note(folder):
        say(note)


@app.command()
def inspect(
    dataset: Dataset,
    model: Annotated[
        Optional[str], typer.Option("--model", help="Tokenizer folder, to show tokens as text.")  # noqa: UP045
    ] = None,
    png: Annotated[
        Optional[str], typer.Option(help="Plot frequency by rank into this file.")  # noqa: UP045
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Describe a dataset: counts, how often tokens occur, and how it begins.

    $ smtrain data inspect tokens --model demo://smollm2  # with its first words
    """
    from smtrain.client.follow.curve import sparkline

    require_name("DATASET", dataset)
    from smtrain.worker.data import summary

    summary_of_data = summary.inspect(
        Path(folder_of(dataset)), Path(options.model_folder(model)) if model else None
    )
    if png:
        summary.save_picture(summary_of_data, Path(png), dataset)
    if as_json:
        say(json.dumps(summary_of_data.facts, indent=2), raw=True)
        return
    for key, value in summary_of_data.facts.items():
        if value not in ({}, [], None):
            say(f"{key.replace('_', ' '):16} {_format_fact(value)}")
    columns = room()
    say(
        "\noccurrences by rank, both"
        f" logarithmic\n{sparkline(summary.ranks(summary_of_data.counts), min(60, columns))}\n"
    )
    widest = summary_of_data.top[0][2] if summary_of_data.top else 1.0
    names = [
        f"{number}" if text is None else f"{number} {text!r}"
        for number, text, _ in summary_of_data.top
    ]
    # on a narrow terminal the names stand closer, and the bars are as long as what is left
    wide = 24 if columns >= 64 else max(map(len, names), default=0)
    longest = max(4, min(30, columns - wide - 9))
    for name, (_, _, share) in zip(names, summary_of_data.top, strict=True):
        say(f"{name:>{wide}} {share:7.2%} {'█' * max(1, round(longest * share / widest))}")
    if summary_of_data.sample is not None:
        say(f"\nbegins: {summary_of_data.sample!r}")


def _format_fact(value: object) -> str:
    """A count or a fact as one reads it."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_format_fact(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(map(_format_fact, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


app.command(
    groups={
        "How the text is read": "--format --text-column --limit-mb",
        "What is counted": "--model --against --filter --near-duplicates --pii --phone-region",
        "Languages": "--fix-mojibake --language --language-model",
        "Output": "--out --overwrite",
    },
)(report)


@app.command()
def export(dataset: Dataset, output: Out, seq_len: SeqLen = 4096) -> None:
    """Write blocks of input_ids, attention_mask and labels that `datasets.load_from_disk` opens.

    $ smtrain data export tokens blocks --seq-len 2048  # for datasets.load_from_disk
    """
    register_flags(FLAGS)
    require_name("DATASET", dataset)
    options.folder_of("OUT", output)
    from smtrain.worker.data.pack import exchange

    dataset = folder_of(dataset)
    say(
        f"{output}: {exchange.export_blocks(Path(dataset), Path(output), seq_len):,} blocks of"
        f" {seq_len}"
    )
    if note := exchange.held_out_note(Path(dataset)):
        say(note)


@app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="Megatron PREFIX, or Arrow/Parquet with input_ids."),
    ],
    output: Out,
    model: Model,
    seq_len: SeqLen = 4096,
    overwrite: options.Overwrite = False,
) -> None:
    """Make a prepared dataset of tokens that other programs wrote.

    $ smtrain data import megatron/corpus tokens --model model  # corpus.bin and corpus.idx
    """
    register_flags(FLAGS)
    require_name("SOURCE", source)
    require_name("--model", model)
    options.folder_of("OUT", output)
    from smtrain.core.protocol.prepared import size_words
    from smtrain.worker.data.pack import exchange
    from smtrain.worker.data.read.ignored_fields import ignored_text_sentence

    dataset = exchange.import_tokens(
        Path(source), Path(output), Path(options.model_folder(model)), seq_len, overwrite=overwrite
    )
    say(f"{output}: {dataset.documents:,} documents, {size_words(vars(dataset))}")
    for sentence in dataset.left_out:
        say(sentence)
    if dataset.unread:
        say(ignored_text_sentence(dataset.unread))
