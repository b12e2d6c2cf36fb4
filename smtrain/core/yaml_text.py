"""Parse YAML of users into plain values, bounded in size, depth and time; each fault has its line
and key.

YAML allows more than settings need: tags that name classes, lists as keys, aliases that expand to
gigabytes. Values are built from the parser's events, so no constructor of the yaml library runs,
and no error of it can escape.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.constructor import SafeConstructor

from smtrain.core.files import read_whole

MOST_BYTES = 1 << 20
"""Size limit of a text, in bytes."""
MOST_VALUES = 10_000
"""Limit of keys and values, including those that aliases repeat; more would take over a second to
check.
"""
MOST_DEPTH = 50
_LONGEST_NUMBER = 100
_LONGEST_KEY = 200
_CORE = "tag:yaml.org,2002:"
_TEXTS = {f"{_CORE}{name}" for name in ("str", "value", "merge")}
_MERGE = f"{_CORE}merge"
_PLACEHOLDER = re.compile(r"\{\{.{0,80}?\}\}|\{%.{0,80}?%\}")
_FORBIDDEN = re.compile(
    "[^\\x09\\x0a\\x0d\\x20-\\x7e\\x85\\xa0-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]"
)
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
    "timestamp": "a date",
}
# Remedies for syntax errors by a part of the parser's message (libyaml's and Python's wording).
_REMEDIES = (
    (
        r"character '\\?t'|character that cannot start any token",
        "indent with spaces; put text that begins with a special character in quotes",
    ),
    (
        "mapping values are not allowed",
        "put a value that holds `: ` in quotes, and indent the keys of a section alike",
    ),
    ("expected ':'", "write `key: value`"),
    ("expected ',' or|unexpected end of stream|quoted scalar", "close the bracket or the quote"),
    ("escape", r"in double quotes write \\ for a backslash, or use single quotes"),
    (
        "expected <block end>|did not find expected key",
        "indent the keys of a section alike, and close the quotes before a value's end",
    ),
)
_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class YamlError(ValueError):
    """Text that YAML or settings cannot use: the fault and the remedy."""

    def __init__(self, message: str, line: int = 0, key: str = "", *, syntax: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        """Line number from 1; 0 for the whole text."""
        self.key = key
        """The key of the value, such as `data.sources[1].path`; empty at the top level."""
        self.syntax = syntax
        """The text is not YAML at all."""

    def __str__(self) -> str:
        place = f"line {self.line}" if self.line else ""
        if self.syntax:
            return f"not YAML{place and f' at {place}'} ({self.message.replace('; ', '); ', 1)}"
        return ": ".join(filter(None, [", ".join(filter(None, [place, self.key])), self.message]))


def parse(text: str, *, unknown_tags: bool = False) -> Any:
    """The value of a YAML text: dicts with text keys, lists, texts, numbers, booleans and None.

    Raises `YamlError`.

    Each alias becomes a copy. Keys and dates stay as written. With `unknown_tags` a value with a
    tag of another program (`!function`) is None; otherwise it is a fault.
    """
    text = text.removeprefix("\ufeff")
    if len(text) > MOST_BYTES:
        raise YamlError(
            f"the text is longer than {MOST_BYTES:,} characters; settings need less, so name"
            " another file"
        )
    if wrong := _FORBIDDEN.search(text):
        _forbidden(text, wrong)
    reader = _Values(text, unknown_tags)
    try:
        return reader.document()
    except yaml.YAMLError as error:
        _not_yaml(error, reader)


def dump(value: Any) -> str:
    """A value on one line of YAML, such as `[a, b]`."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=1 << 30, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


@dataclass
class _Anchored:
    """A value with an anchor (`&name`)."""

    value: Any = None
    values: int = 0
    depth: int = 0
    is_complete: bool = False
    """Whether its end has been read."""


class _Values:
    """Builds values from the parser's events, in one pass."""

    def __init__(self, text: str, unknown_tags: bool) -> None:
        self.text, self.way = text, ""
        self._unknown_tags = unknown_tags
        self._events: Any = yaml.parse(text, Loader=_PARSER)
        self._resolver = yaml.resolver.Resolver()
        self._constructor = SafeConstructor()
        self._anchors: dict[str, _Anchored] = {}
        self._values = 0
        self._deepest = 0

    def document(self) -> Any:
        """The value of the only document; None for an empty text."""
        value = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                value = self._value(next(self._events), 1)
                next(self._events)
                break
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                self.way = ""
                self.fault(
                    event, "a second document begins (`---`); keep one document in each file"
                )
        return value

    def fault(self, event: Any, message: str) -> NoReturn:
        """Raise a fault at the line of an event."""
        way = self.way if len(self.way) <= _LONGEST_KEY else f"{self.way[:_LONGEST_KEY]}..."
        raise YamlError(message, event.start_mark.line + 1, way)

    def _value(self, event: Any, depth: int) -> Any:
        self._count(event, 1, depth)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, depth)
        anchor = _Anchored()
        if event.anchor:
            self._anchors[event.anchor] = anchor
        count_before, outer, self._deepest = self._values, self._deepest, depth
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self._list(event, depth)
        else:
            value = self._mapping(event, depth)
        anchor.value, anchor.values, anchor.is_complete = value, self._values - count_before, True
        anchor.depth = self._deepest - depth
        self._deepest = max(outer, self._deepest)
        return value

    def _count(self, event: Any, count: int, depth: int) -> None:
        """Refuse a text with too many values before they are built."""
        self._values += count
        self._deepest = max(self._deepest, depth)
        if depth > MOST_DEPTH:
            self.fault(
                event,
                f"its values are nested too deeply, over {MOST_DEPTH} levels; close the brackets"
                " earlier",
            )
        if self._values > MOST_VALUES:
            alias = isinstance(event, yaml.AliasEvent)
            context = f"with the alias *{event.anchor} there are" if alias else "there are"
            self.fault(
                event,
                f"{context} more than {MOST_VALUES:,} values; settings need fewer, so leave some out",
            )

    def _alias(self, event: Any, depth: int) -> Any:
        anchor = self._anchors.get(event.anchor)
        if anchor is None:
            self.fault(
                event,
                f"*{event.anchor} is an alias of nothing; write &{event.anchor} before the value"
                " that it "
                f'repeats, or "*{event.anchor}" in quotes for text',
            )
        if not anchor.is_complete:
            self.fault(
                event,
                f"*{event.anchor} stands within its own value: an anchor holds an alias to itself;"
                " write the value out",
            )
        self._count(event, anchor.values, depth + anchor.depth)
        return copy.deepcopy(anchor.value)

    def _list(self, event: Any, depth: int) -> list[Any]:
        way = self.way
        items: list[Any] = []
        self._plain_tag(event, "seq")
        while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
            self.way = f"{way}[{len(items)}]"
            items.append(self._value(item, depth + 1))
        self.way = way
        return items

    def _mapping(self, event: Any, depth: int) -> dict[str, Any]:
        way = self.way
        self._plain_tag(event, "map")
        mapping: dict[str, Any] = {}
        lines: dict[str, int] = {}
        merged_mappings: list[Any] = []
        while not isinstance(key := next(self._events), yaml.MappingEndEvent):
            self.way = way
            name, merge = self._key(event, key, depth)
            if merge:
                if merged_mappings:
                    self.fault(
                        key, "`<<` is written twice; put both into a list, `<<: [*one, *other]`"
                    )
                merged_mappings += self._merge_mappings(
                    key, self._value(next(self._events), depth + 1)
                )
                continue
            if name in lines:
                self.fault(
                    key,
                    f"{name!r} is written twice (first at line {lines[name]}); put both into one",
                )
            lines[name] = _line(key)
            self.way = f"{way}.{name}" if way else name
            mapping[name] = self._value(next(self._events), depth + 1)
        self.way = way
        for values in merged_mappings:  # the first of several wins (yaml.org/type/merge.html)
            mapping = {**values, **mapping}
        return mapping

    def _merge_mappings(self, key: Any, value: Any) -> list[dict[str, Any]]:
        """The mappings that `<<` merges."""
        mappings = value if isinstance(value, list) else [value]
        if not all(isinstance(mapping, dict) for mapping in mappings):
            self.fault(
                key,
                "`<<` takes the keys of an anchored section; write `<<: *name`, or put << in"
                " quotes",
            )
        return mappings

    def _key(self, mapping: Any, event: Any, depth: int) -> tuple[str, bool]:
        """The text of a key, and whether it is the merge key `<<`."""
        if isinstance(event, yaml.AliasEvent):
            value = self._value(event, depth + 1)
            if not isinstance(value, str):
                self.fault(
                    event,
                    f"the alias *{event.anchor} is no text, so it cannot be a key; write the"
                    " key out",
                )
            return value, False
        if not isinstance(event, yaml.ScalarEvent):
            kind = "a list" if isinstance(event, yaml.SequenceStartEvent) else "a mapping"
            self.fault(
                event,
                self._placeholder_fault(event)
                or self._placeholder_fault(mapping)
                or f"{kind} cannot be a key; write text before the colon,"
                " and put a value that begins with a bracket in quotes",
            )
        self._count(event, 1, depth)
        if event.anchor:
            self._anchors[event.anchor] = _Anchored(event.value, 1, 0, is_complete=True)
        tag = self._tag(event)
        if not event.value.strip():
            self.fault(event, "a key is empty; write its name before the colon")
        if len(event.value) > _LONGEST_KEY:
            self.fault(
                event,
                f"a key has {len(event.value):,} characters; at most {_LONGEST_KEY} are taken",
            )
        if not tag.startswith(_CORE):
            self._foreign(event)
        return event.value, tag == _MERGE

    def _placeholder_fault(self, event: Any) -> str:
        """The fault of a template placeholder in the line of an event, else empty."""
        return placeholder_fault(self.text.split("\n")[event.start_mark.line :][:1])

    def _scalar(self, event: Any) -> Any:
        tag = self._tag(event)
        name = tag.removeprefix(_CORE)
        if tag in _TEXTS:
            return event.value
        if not tag.startswith(_CORE) and self._unknown_tags:
            return None
        if name not in _WORDS:
            self._foreign(event)
        if name in ("int", "float") and len(event.value) > _LONGEST_NUMBER:
            self.fault(
                event,
                f"a number has {len(event.value):,} characters, at most {_LONGEST_NUMBER} are"
                " taken; put it in quotes if text is meant",
            )
        node = yaml.ScalarNode(tag, event.value)
        try:
            value = getattr(self._constructor, f"construct_yaml_{name}")(node)
        except (ValueError, KeyError, AttributeError, OverflowError, IndexError, TypeError):
            text = event.value if len(event.value) <= 60 else f"{event.value[:60]}..."
            self.fault(
                event,
                f"{text} is not {_WORDS[name]}{' of the calendar' if name == 'timestamp' else ''}; "
                "correct it, or put it in quotes if text is meant",
            )
        return event.value if name == "timestamp" else value

    def _tag(self, event: Any) -> str:
        """The tag of a scalar: the one written, else the one of its form."""
        if event.tag and event.tag != "!":
            return str(event.tag)
        implicit = event.implicit if event.tag is None else (False, True)
        resolver: Any = self._resolver
        return str(resolver.resolve(yaml.ScalarNode, event.value, implicit))

    def _plain_tag(self, event: Any, name: str) -> None:
        """Refuse a list or mapping with any tag but its standard one."""
        core_tags = (None, "!", f"{_CORE}{name}")
        if event.tag not in core_tags and not (
            self._unknown_tags and not str(event.tag).startswith(_CORE)
        ):
            self._foreign(event)

    def _foreign(self, event: Any) -> NoReturn:
        tag = str(event.tag)
        tag = f"!!{tag.removeprefix(_CORE)}" if tag.startswith(_CORE) else tag
        self.fault(
            event,
            f"the tag {tag} is not for settings; leave it out, and put text that begins with ! in"
            " quotes",
        )


def _line(event: Any) -> int:
    """Line number of an event, from 1."""
    return int(event.start_mark.line) + 1


def placeholder_fault(lines: list[str]) -> str:
    """The fault of a template placeholder in these lines, else empty."""
    placeholder = next((match for line in lines if (match := _PLACEHOLDER.search(line))), None)
    return (
        f"{placeholder[0]} is a placeholder that no template has filled in; put its value there"
        if placeholder
        else ""
    )


def _forbidden(text: str, wrong: re.Match[str]) -> NoReturn:
    line = text.count("\n", 0, wrong.start()) + 1
    code = ord(wrong[0])
    if 0xD800 <= code <= 0xDFFF:
        raise YamlError(r"it holds a byte outside UTF-8; save the text as UTF-8", line)
    escape_remedy = f', or write "\\x{code:02x}" in double quotes' if 0 < code < 0x100 else ""
    message = f"it holds the character U+{code:04X}, which YAML does not allow; take it out{escape_remedy}"
    raise YamlError(message, line, syntax=code != 0)


def _not_yaml(error: yaml.YAMLError, reader: _Values) -> NoReturn:
    """Raise a `YamlError` for an error of the parser."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = mark.line + 1 if mark else 0
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    if "nesting" in problem:
        raise YamlError(
            "its values are nested too deeply; close the brackets earlier", line, reader.way
        ) from None
    lines = reader.text.split("\n")
    if message := placeholder_fault(lines[max(0, line - 2) : line]):
        raise YamlError(message, line, reader.way, syntax=False) from None
    remedy = next(
        (words for part, words in _REMEDIES if re.search(part, problem)),
        "put text with special characters in quotes",
    )
    raise YamlError(f"{problem}; {remedy}", line, reader.way, syntax=True) from None


def config_hint(path: str | Path) -> str:
    """`it is a config, whose run is NAME; ` for the file of a config; else empty."""
    file = Path(path)
    try:
        content = parse(read_whole(file)) if file.suffix in (".yaml", ".yml") else None
    except (OSError, ValueError, YamlError):
        return ""
    run = content.get("name") if isinstance(content, dict) else None
    return f"it is a config, whose run is {run}; " if isinstance(run, str) else ""
