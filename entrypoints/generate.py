"""Stage generate: prompts -> text, from the Hugging Face folder in channel `model`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from smtrain.core.config import JobConfig
from smtrain.core.extras import pause_collector
from smtrain.core.protocol.container import Container
from smtrain.worker.entry import main


def stage(config: JobConfig, container: Container) -> None:
    with pause_collector():
        from smtrain.worker.generation.stage import generate

    options, folder = config.generate, container.channel("model")
    if container.has_channel("base"):  # the export is an adapter
        from smtrain.worker.checkpoint.convert import convert
        from smtrain.worker.checkpoint.targets import HuggingFace

        merged_folder = Path(tempfile.mkdtemp()) / "merged"
        convert(container.channel("base"), merged_folder, to=HuggingFace(), merge_adapter=folder)
        folder = merged_folder
    texts = generate(
        folder,
        list(options.prompts),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seed=config.train.seed,
        # Pairs of answers may be plain text, of a model without a template.
        chat={"sft": True, "dpo": None}.get(config.train.objective, False),
        template_options=config.model.chat_template_kwargs,
    )
    pairs = [
        {"prompt": prompt, "completion": text}
        for prompt, text in zip(options.prompts, texts, strict=True)
    ]
    container.model_dir.mkdir(parents=True, exist_ok=True)
    (container.model_dir / "generation.json").write_text(
        json.dumps(pairs, indent=2) + "\n", "utf-8"
    )
    between = "\n" if config.train.objective != "pretrain" else ""
    for pair in pairs:
        print(f"> {pair['prompt']}{between}{pair['completion']}", flush=True)


if __name__ == "__main__":
    main(stage)
