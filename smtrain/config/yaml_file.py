"""YAML as people mean it: a key written twice is a mistake, an anchor within itself too."""

from __future__ import annotations

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """yaml's safe loader, which alone would keep the last of two equal keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True) if key_node.tag != "tag:yaml.org,2002:merge" else None
            if key is not None and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is written twice; put both into one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse(text: str) -> Any:
    """The value of a YAML document. Raises `yaml.YAMLError`, with the place, for what is none."""
    try:
        value = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
        if _nested(value, ()):
            raise yaml.YAMLError("an anchor holds an alias to itself")
    except RecursionError:
        raise yaml.YAMLError("its values are nested too deeply") from None
    return value


def _nested(value: Any, inside: tuple[int, ...]) -> bool:
    """Whether a value holds itself."""
    if not isinstance(value, dict | list):
        return False
    if id(value) in inside:
        return True
    items = value.values() if isinstance(value, dict) else value
    return any(_nested(item, (*inside, id(value))) for item in items)
