"""Stage prepare: text in channel `text`, the tokenizer in channel `model` -> packed tokens in the model folder."""

from __future__ import annotations

from smtrain.config import JobConfig
from smtrain.container import Container
from smtrain.train.entry import main


def stage(config: JobConfig, container: Container) -> None:
    from smtrain.data.prepare import prepare

    manifest = prepare(
        container.channel("text"),
        container.model_dir,
        container.channel("model"),
        seq_len=config.train.seq_len,
        text_column=config.data.text_column,
        format=config.data.format,
        workers=config.data.workers,
        max_bad=config.data.max_bad,
    )
    print(f"{manifest.documents} documents, {manifest.tokens} tokens, {manifest.samples} samples", flush=True)


if __name__ == "__main__":
    main(stage)
