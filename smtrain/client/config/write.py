"""Write one key into a YAML file of a config, and leave every other character of the file as it
is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from smtrain.core.errors import ConfigError
from smtrain.core.yaml_text import YamlError, parse


def with_value(text: str, keys: Sequence[str], value: Any) -> str:
    """The text of a YAML mapping in which the value at `keys` is another one; sections that are
    missing are added.

    Raises `ConfigError` if the text cannot be changed without changing something else, as with
    anchors and aliases.
    """
    wanted = parse(text) or {}
    here = wanted
    for key in keys[:-1]:
        if here.get(key) is None:
            here[key] = {}
        here = here[key]
        if not isinstance(here, dict):
            raise _by_hand(keys, f"{key} holds a value, not keys")
    here[keys[-1]] = value
    try:
        changed = _changed(text, list(keys), value)
        if parse(changed) == wanted:
            return changed
    except (YamlError, yaml.YAMLError):  # the latter for JSON with tabs, which is no YAML
        pass
    raise _by_hand(keys, "the file is written in a way that cannot be changed safely")


def _by_hand(keys: Sequence[str], reason: str) -> ConfigError:
    return ConfigError(
        f"{'.'.join(keys)}: {reason}; edit the file by hand", code="config.unreadable"
    )


def _changed(text: str, keys: list[str], value: Any) -> str:
    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is None or not isinstance(node, yaml.MappingNode):
        return _with_block(text, len(text), keys, value, 0)
    for depth, key in enumerate(keys):
        found = next((pair for pair in node.value if getattr(pair[0], "value", None) == key), None)
        if found is None:
            return _inserted(text, node, keys[depth:], value)
        node = found[1]
        if depth == len(keys) - 1 or not isinstance(node, yaml.MappingNode):
            start, between = (
                node.start_mark.index,
                text[found[0].end_mark.index : node.start_mark.index],
            )
            if "\n" in between and "#" not in between:  # a block below its key
                start = found[0].end_mark.index + between.index(":") + 1
            # An empty value has no place in the text: it ends at its key's colon.
            gap = "" if text[start - 1].isspace() else " "
            end = _end(text, node)
            gap_after = _line_end(text) if text[start:end].endswith("\n") else ""  # a block of text
            rest = _flow(_nested(keys[depth + 1 :], value)) + gap_after
            return text[:start] + gap + rest + text[end:]
    return text


def _inserted(text: str, node: Any, keys: list[str], value: Any) -> str:
    """The text with new keys as the last of a mapping."""
    if node.flow_style:
        at = node.end_mark.index - 1
        before = text[:at].rstrip()
        comma = "" if before.endswith("{") else " " if before.endswith(",") else ", "
        return f"{before}{comma}{_flow(_nested(keys, value))[1:-1]}{text[at:]}"
    if not node.value:
        return text
    first, (_, last) = node.value[0][0], node.value[-1]
    end = _end(text, last)
    line_end = text.find("\n", end)
    at = len(text) if line_end < 0 else line_end + 1
    return _with_block(text, at, keys, value, first.start_mark.column)


def _end(text: str, node: Any) -> int:
    """The end of a value. A block's mark is after the blank lines and comments that follow it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(node, yaml.MappingNode) else last)
    return int(node.end_mark.index)


def _with_block(text: str, at: int, keys: list[str], value: Any, indent: int) -> str:
    """The text with lines for the keys and their value at a line's beginning, or at the text's
    end.
    """
    end = _line_end(text)
    lines = [f"{' ' * (indent + 2 * depth)}{key}:" for depth, key in enumerate(keys)]
    before = end if at and text[at - 1] != "\n" else ""
    return text[:at] + before + end.join(lines) + f" {_flow(value)}{end}" + text[at:]


def _line_end(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _nested(keys: list[str], value: Any) -> Any:
    for key in reversed(keys):
        value = {key: value}
    return value


def _flow(value: Any) -> str:
    """A value on one line."""
    text = yaml.safe_dump(
        value, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")
