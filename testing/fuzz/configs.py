"""Mutations of sample configs: of their values, their text and their bytes."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from smtrain.client.planner.resolve import load_config
from smtrain.core.config.annotations import section_in
from smtrain.core.config.schema import JobConfig
from smtrain.core.errors import ConfigError
from testing.fuzz.samples import sample

_TRIES = 8
STRINGS = (
    "",
    " ",
    "a b",
    "a\nb",
    "a\r\nb",
    "a\rb",
    "\n",
    "it's",
    'say "x"',
    "`id`",
    "$(touch X)",
    "${HOME}",
    "a;b",
    "a&b|c",
    "#x",
    "\t",
    "\x00",
    "\x07",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;t\x07",
    "\x85",
    "\u2028",
    "\u202eabc",
    "é",
    "模型",
    "😀",
    "\ud800",
    "..",
    "/nonexistent",
    "~",
    "~nobody/x",
    "/dev/zero",
    "/proc/self/mem",
    "*",
    "[",
    "**/*",
    "%s",
    "%(a)s",
    "{a}",
    "{",
    "{{ a }}",
    "\\",
    "\\n",
    "'",
    '"',
    "-",
    "--help",
    "-x",
    "a" * 300,
    "a" * 5000,
    "s3://",
    "s3://b",
    "s3://a b/c",
    "s3://Bad_/x",
    "hf://",
    "hf://x/y",
    "run://",
    "run://x",
    "oss://b/x",
    "file:///x",
    "file://",
    "fsx://x",
    "demo://",
    "demo://tiny-llama",
    "http://[::1",
    "nan",
    "1e5",
    "1d",
    "-1",
    "99999d",
    "0x10",
    "auto",
    "none",
    "null",
    "ml.p5.48xlarge",
    "ml.trn2.48xlarge",
    "ml.trn9.x",
    "box",
    "cpu",
)
NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    64,
    1024,
    65536,
    2**31,
    2**63,
    2**64,
    10**30,
    -(10**30),
    0.0,
    -0.0,
    0.5,
    1.5,
    1e-300,
    1e300,
    float("inf"),
    float("-inf"),
    float("nan"),
    True,
    False,
)


def _keys() -> list[tuple[tuple[str, ...], Any]]:
    """Every key of the schema, as a path, with the type of its value."""
    keys: list[tuple[tuple[str, ...], Any]] = []

    def walk(model: type[BaseModel], path: tuple[str, ...]) -> None:
        for name, field in model.model_fields.items():
            keys.append(((*path, name), field.annotation))
            inner = section_in(field.annotation)
            if inner and len(path) < 4:
                walk(inner, (*path, name))

    walk(JobConfig, ())
    return keys


KEYS = _keys()


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a config."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [inner for key, item in items for inner in ((*path, key), *_paths(item, (*path, key)))]


def _parent(raw: Any, path: tuple[Any, ...]) -> Any:
    for part in path[:-1]:
        raw = raw[part]
    return raw


def any_value(rng: random.Random, depth: int = 0) -> Any:
    """A value of any type."""
    kind = rng.randrange(10)
    if kind < 4:
        return rng.choice(STRINGS)
    if kind < 7:
        return rng.choice(NUMBERS)
    if kind == 7 or depth > 2:
        return None
    if kind == 8:
        return [any_value(rng, depth + 1) for _ in range(rng.choice([0, 1, 1, 2, 20]))]
    keys = ["path", "uri", "type", "name", "x", "1", "", "a.b", "$(touch X)"]
    return {rng.choice(keys): any_value(rng, depth + 1) for _ in range(rng.choice([0, 1, 2, 3]))}


def _replace(raw: dict[str, Any], rng: random.Random) -> str:
    path = rng.choice(_paths(raw))
    _parent(raw, path)[path[-1]] = any_value(rng)
    return f"replace {path}"


def typed_value(kind: Any, rng: random.Random) -> Any:
    """A value of an annotated type, which the schema may accept."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        return typed_value(inner[0], rng)
    if origin in (Union, UnionType):
        return typed_value(rng.choice(inner), rng)
    if origin is Literal:
        return rng.choice(inner)
    if origin is tuple:
        return [typed_value(inner[0], rng) for _ in range(rng.choice([0, 1, 1, 3]))]
    if origin is dict:
        names = [rng.choice(STRINGS) for _ in range(rng.choice([0, 1, 2]))]
        return {name if inner[0] is str else "box": typed_value(inner[1], rng) for name in names}
    if origin in (bool, int, float):
        return rng.choice([value for value in NUMBERS if isinstance(value, origin)])
    if isinstance(origin, type) and issubclass(origin, BaseModel):
        fields = rng.sample(sorted(origin.model_fields), min(2, len(origin.model_fields)))
        return {name: typed_value(origin.model_fields[name].annotation, rng) for name in fields}
    return rng.choice(STRINGS) if origin is str else None


def _set(raw: dict[str, Any], rng: random.Random) -> str:
    """Any key of the schema gets a value, usually of its type."""
    path, kind = rng.choice(KEYS)
    parent: Any = raw
    for part in path[:-1]:
        child = parent.get(part)
        child = child if isinstance(child, dict) else {}
        parent[part] = child
        parent = child
    parent[path[-1]] = typed_value(kind, rng) if rng.random() < 0.8 else any_value(rng)
    return f"set {'.'.join(path)}"


def _insert(raw: dict[str, Any], rng: random.Random) -> str:
    """Put odd characters into a text."""
    texts = [path for path in _paths(raw) if isinstance(_parent(raw, path)[path[-1]], str)]
    free = [path for path in texts if path[-1] not in _WORDS or len(path) > 2]
    path = rng.choice(free or texts)
    parent, text = _parent(raw, path), _parent(raw, path)[path[-1]]
    at = rng.randrange(len(text) + 1)
    parent[path[-1]] = text[:at] + rng.choice(STRINGS) + text[at:]
    return f"insert into {path}"


def _delete(raw: dict[str, Any], rng: random.Random) -> str:
    path = rng.choice(_paths(raw))
    del _parent(raw, path)[path[-1]]
    return f"delete {path}"


def _rename(raw: dict[str, Any], rng: random.Random) -> str:
    path = rng.choice([path for path in _paths(raw) if isinstance(path[-1], str)])
    parent = _parent(raw, path)
    parent[rng.choice([path[-1][:-1], path[-1].upper(), f"{path[-1]}s", *STRINGS])] = parent.pop(
        path[-1]
    )
    return f"rename {path}"


def _wrap(raw: dict[str, Any], rng: random.Random) -> str:
    path = rng.choice(_paths(raw))
    parent = _parent(raw, path)
    parent[path[-1]] = rng.choice(
        [[parent[path[-1]]], [parent[path[-1]]] * 3, {"x": parent[path[-1]]}, str(parent[path[-1]])]
    )
    return f"wrap {path}"


def _swap(raw: dict[str, Any], rng: random.Random) -> str:
    first, second = rng.choice(_paths(raw)), rng.choice(_paths(raw))
    if first[: len(second)] == second or second[: len(first)] == first:
        return _replace(raw, rng)
    a, b = _parent(raw, first), _parent(raw, second)
    a[first[-1]], b[second[-1]] = b[second[-1]], a[first[-1]]
    return f"swap {first} {second}"


_WORDS = (
    "name",
    "target",
    "objective",
    "format",
    "precision",
    "instance_type",
    "region",
    "role",
    "s3_uri",
    "max_run",
)
"""Keys with few values, of which the first check refuses any other."""
VALUES: tuple[Callable[[dict[str, Any], random.Random], str], ...] = (
    _replace,
    _set,
    _set,
    _set,
    _set,
    _set,
    _insert,
    _insert,
    _insert,
    _delete,
    _rename,
    _wrap,
    _swap,
)


def _format_config(raw: dict[str, Any], rng: random.Random) -> str:
    if rng.random() < 0.15:
        return json.dumps(raw)
    unicode, flow = rng.random() < 0.5, rng.choice([False, False, None])
    text: str = yaml.safe_dump(raw, allow_unicode=unicode, default_flow_style=flow, sort_keys=False)
    return text


_SNIPPETS = (
    "---\n",
    "...\n",
    "a: &a [1]\n",
    "b: *a\n",
    "<<: *x\n",
    "<<: {name: y}\n",
    "? x\n: y\n",
    "name: !!python/name:os\n",
    "tags: !!binary aGk=\n",
    "tags: {a: !x 1}\n",
    "name: two\n",
    "train: {steps: 1}\n",
    "\tx: 1\n",
    "  x: 1\n",
    "- 1\n",
    "x: [\n",
    "x: 'y\n",
    "%YAML 1.1\n",
    "{{ x }}: 1\n",
    "\ufeff",
    "\x00",
    "data: |\n  text\n",
    "data: >-\n",
    ": 1\n",
    "train: " + "[" * 3000 + "\n",
    "train: " + "{a: " * 60 + "1" + "}" * 60 + "\n",
    "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}' if n else 'ha'] * 9)}]\n" for n in range(12)),
    "m0: &m0 {a: b}\n"
    + "".join(f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}]}}\n" for n in range(1, 30)),
)


def _text(text: str, rng: random.Random) -> str:
    """Change the text: lines twice, elsewhere, indented otherwise, cut, and pieces of YAML between
    them.
    """
    rows = text.splitlines(keepends=True) or [""]
    n = rng.randrange(len(rows))
    match rng.randrange(7):
        case 0:
            rows.insert(rng.randrange(len(rows) + 1), rng.choice(_SNIPPETS))
        case 1:
            rows.insert(rng.randrange(len(rows) + 1), rows[n])
        case 2:
            rows[n] = rng.choice(["\t", " ", "   ", "- ", "? ", "&a ", "!x "]) + rows[n]
        case 3:
            return text[: rng.randrange(len(text) + 1)]
        case 4:
            at = rng.randrange(len(text) + 1)
            return text[:at] + rng.choice("\t:{}[]&*!|>'\"%@`#,-?\x00\x85\u2028\ufeff") + text[at:]
        case 5:
            del rows[n]
        case 6:
            mark = rng.choice([":", ":\t", " : ", ": &a ", ": !!str ", ": *a "])
            rows[n] = rows[n].rstrip("\n").replace(": ", mark) + "\n"
    return "".join(rows)


def _encode_text(text: str, rng: random.Random) -> bytes:
    """UTF-8 as a rule; other encodings, marks, line ends and changed bytes."""
    plain = text.encode("utf-8", "surrogatepass")
    match rng.randrange(16):
        case 0:
            return b"\xef\xbb\xbf" + plain
        case 1:
            return text.encode("utf-16", "surrogatepass")
        case 2:
            return text.encode("latin-1", "replace") + b"# \xe4\xf6\n"
        case 3:
            return plain.replace(b"\n", b"\r\n")
        case 4:
            return plain.replace(b"\n", b"\r")
        case 5 if plain:
            data = bytearray(plain)
            data[rng.randrange(len(data))] = rng.randrange(256)
            return bytes(data)
    return plain


def mutate_config(rng: random.Random) -> tuple[str, bytes]:
    """The label and the bytes of a config with one to three mutations; half of the time one that
    the checks accept, if one of some tries is.
    """
    if rng.random() < 0.5:
        for _ in range(_TRIES):
            label, raw = _mutate_values(rng)
            with contextlib.suppress(ConfigError):
                load_config(raw)
                return f"{label}, accepted", _format_config(raw, rng).encode(
                    "utf-8", "surrogatepass"
                )
    label, raw = _mutate_values(rng)
    text = _format_config(raw, rng)
    if rng.random() < 0.3:
        text, label = _text(text, rng), f"{label}, text"
    return label, (
        _encode_text(text, rng) if rng.random() < 0.3 else text.encode("utf-8", "surrogatepass")
    )


def _mutate_values(rng: random.Random) -> tuple[str, dict[str, Any]]:
    label, raw = sample(rng)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        label += f", {rng.choice(VALUES)(raw, rng)}" if _paths(raw) else ""
    return label, raw
