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
    expected = parse(text) or {}
    section = expected
    for key in keys[:-1]:
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            raise _by_hand(keys, f"{key} holds a value, not keys")
    section[keys[-1]] = value
    try:
        new_text = _replace_value(text, list(keys), value)
        if parse(new_text) == expected:
            return new_text
    except (YamlError, yaml.YAMLError):  # the latter for JSON with tabs, which is no YAML
        pass
    raise _by_hand(keys, "the file is written in a way that cannot be changed safely")


def _by_hand(keys: Sequence[str], reason: str) -> ConfigError:
    return ConfigError(
        f"{'.'.join(keys)}: {reason}; edit the file by hand", code="config.unreadable"
    )


def _replace_value(text: str, keys: list[str], value: Any) -> str:
    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is None or not isinstance(node, yaml.MappingNode):
        return _with_block(text, len(text), keys, value, 0)
    for depth, key in enumerate(keys):
        key_and_value = next(
            (pair for pair in node.value if getattr(pair[0], "value", None) == key), None
        )
        if key_and_value is None:
            return _insert_keys(text, node, keys[depth:], value)
        node = key_and_value[1]
        if depth == len(keys) - 1 or not isinstance(node, yaml.MappingNode):
            start, between = (
                node.start_mark.index,
                text[key_and_value[0].end_mark.index : node.start_mark.index],
            )
            if "\n" in between and "#" not in between:  # a block below its key
                start = key_and_value[0].end_mark.index + between.index(":") + 1
            # An empty value has no place in the text: it ends at its key's colon.
            gap = "" if text[start - 1].isspace() else " "
            end = _end(text, node)
            gap_after = _line_end(text) if text[start:end].endswith("\n") else ""  # a block of text
            new_value = _flow(_nest(keys[depth + 1 :], value)) + gap_after
            return text[:start] + gap + new_value + text[end:]
    return text


def _insert_keys(text: str, node: Any, keys: list[str], value: Any) -> str:
    """The text with new keys as the last of a mapping."""
    if node.flow_style:
        at = node.end_mark.index - 1
        text_before = text[:at].rstrip()
        comma = "" if text_before.endswith("{") else " " if text_before.endswith(",") else ", "
        return f"{text_before}{comma}{_flow(_nest(keys, value))[1:-1]}{text[at:]}"
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
    line_break = end if at and text[at - 1] != "\n" else ""
    return text[:at] + line_break + end.join(lines) + f" {_flow(value)}{end}" + text[at:]


def _line_end(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _nest(keys: list[str], value: Any) -> Any:
    for key in reversed(keys):
        value = {key: value}
    return value


def _flow(value: Any) -> str:
    """A value on one line."""
    text = yaml.safe_dump(
        value, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")
