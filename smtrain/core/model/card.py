"""The model card: README.md of a model's folder, whose front matter the Hugging Face hub reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

README = "README.md"
_FRONT = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_HUB = re.compile(r"(?:hf://)?([A-Za-z0-9][\w.-]*/[\w.-]+?)(?:@.+)?")
_INHERITED_KEYS = ("license", "license_name", "license_link", "language")
"""Keys of the base model's front matter that also hold for the trained model."""
Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def front_matter(text: str) -> dict[str, Any]:
    """The metadata at the head of a README; empty if missing or unreadable."""
    from smtrain.core.yaml_text import YamlError, parse

    match = _FRONT.match(text)
    try:
        values = parse(match[1]) if match else None
    except YamlError:
        return {}
    return values if isinstance(values, dict) else {}


def hub_name(path: str | None) -> str | None:
    """`organization/name` of an hf:// path or of a name of the hub; None for a folder or a URI."""
    match = _HUB.fullmatch(path or "")
    return match[1] if match and not (path or "").startswith(("/", ".")) else None


def metadata(
    base: str | None, readme: str, *, adapter: bool, legal: Iterable[str] = ()
) -> dict[str, Any]:
    """The front matter of a model that was trained from `base` (a name of the hub, or None).

    The licence and languages come from `readme`, the base model's. If it names no licence, the hub
    is pointed to one of `legal`, the licence files next to the weights.
    """
    base_front = front_matter(readme)
    front: dict[str, Any] = {key: base_front[key] for key in _INHERITED_KEYS if base_front.get(key)}
    files = sorted(legal)
    if "license" not in front and files:
        license_file = next(
            (name for name in files if name.upper().startswith(("LICEN", "COPYING"))), files[0]
        )
        front |= {"license": "other", "license_name": "see-file", "license_link": license_file}
    if base:
        front |= {"base_model": base, "base_model_relation": "adapter" if adapter else "finetune"}
    front["library_name"] = "peft" if adapter else "transformers"
    front["pipeline_tag"] = "text-generation"
    front["tags"] = ["smtrain", *(["lora"] if adapter else [])]
    return front


def card(title: str, front_matter: Mapping[str, Any], paragraphs: Iterable[str]) -> str:
    """A whole README.md: front matter (JSON values are YAML's too), a title and paragraphs of
    Markdown.
    """
    head = "".join(
        f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in front_matter.items()
    )
    return f"---\n{head}---\n\n# {title}\n\n" + "\n\n".join(paragraphs) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows as a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def usage(name: str, *, adapter: bool) -> str:
    """The section that shows how to load the model."""
    load = (
        "from peft import AutoPeftModelForCausalLM\n\nmodel ="
        f' AutoPeftModelForCausalLM.from_pretrained("{name}")'
        if adapter
        else (
            "from transformers import AutoModelForCausalLM\n\nmodel ="
            f' AutoModelForCausalLM.from_pretrained("{name}")'
        )
    )
    return (
        f"## Use\n\n```python\nfrom transformers import AutoTokenizer\n{load}\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```'
    )
