"""Write long documents of this machine, and a small model that has 2,048 positions.

The documents are plain references of AWS's services, out of botocore's service descriptions: first
the operations, then each structure that they take or return. So a name returns thousands of tokens
after it was first written.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

import botocore

from smtrain.core.demo.inputs import END, save_tokenizer

HERE = Path(__file__).parent
VOCABULARY, HELD_OUT, SHORTEST = 1024, 24, 20_000  # tokens, documents, characters
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def first_sentence(documentation: str) -> str:
    words = html.unescape(re.sub(r"<[^>]+>", "", documentation)).split()
    return " ".join(words).partition(". ")[0][:160]


def reference(service: dict[str, Any]) -> str:
    """The text of one document."""
    about = service["metadata"]
    lines = [f"{about['serviceFullName']}, version {about['apiVersion']}", ""]
    for name, operation in service["operations"].items():
        errors = ", ".join(error["shape"] for error in operation.get("errors", ()))
        lines.append(f"{name}: {first_sentence(operation.get('documentation', ''))}.")
        lines += [f"  takes {operation['input']['shape']}"] if "input" in operation else []
        lines += [f"  returns {operation['output']['shape']}"] if "output" in operation else []
        lines += [f"  raises {errors}"] if errors else []
    for name, shape in service["shapes"].items():
        if shape["type"] == "structure":
            required = shape.get("required", ())
            lines += ["", name]
            for member, target in shape["members"].items():
                lines.append(
                    f"  {member}: {target['shape']}{', required' if member in required else ''}"
                )
        elif "enum" in shape:
            lines += ["", f"{name}: {' | '.join(shape['enum'])}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    described = sorted(Path(botocore.__file__).with_name("data").glob("*/*/service-2.json.gz"))
    newest = {path.parent.parent.name: path for path in described}
    texts = [reference(json.loads(gzip.decompress(path.read_bytes()))) for path in newest.values()]
    texts = [text for text in texts if len(text) > SHORTEST]
    texts.sort(
        key=lambda text: hashlib.sha256(text.encode()).digest()
    )  # held-out services are of every kind
    for name, part in (("held-out", texts[:HELD_OUT]), ("text", texts[HELD_OUT:])):
        folder = HERE / "data" / name
        folder.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"text": text}) + "\n" for text in part)
        (folder / "services.jsonl").write_text("".join(lines), "utf-8")
    model = HERE / "model"
    model.mkdir(exist_ok=True)
    save_tokenizer(texts[HELD_OUT:], model, vocabulary=VOCABULARY, end=END)
    (model / "config.json").write_text(json.dumps(MODEL, indent=2) + "\n", "utf-8")
    print(
        f"{len(texts)} documents, {sum(map(len, texts)):,} characters, {HELD_OUT} of them held out"
    )


if __name__ == "__main__":
    main()
