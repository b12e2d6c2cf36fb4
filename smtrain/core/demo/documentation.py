"""Questions and answers from the documentation of Python's functions, classes and methods on this
machine.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

# Modules whose import has no side effects; those that this Python lacks are skipped.
MODULES = (
    "builtins",
    "argparse",
    "ast",
    "base64",
    "bisect",
    "calendar",
    "codecs",
    "collections",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "enum",
    "fileinput",
    "fnmatch",
    "fractions",
    "functools",
    "getpass",
    "glob",
    "gzip",
    "hashlib",
    "heapq",
    "hmac",
    "html",
    "http.client",
    "inspect",
    "io",
    "ipaddress",
    "itertools",
    "json",
    "linecache",
    "locale",
    "logging",
    "math",
    "mimetypes",
    "operator",
    "os",
    "os.path",
    "pathlib",
    "pickle",
    "platform",
    "pprint",
    "queue",
    "random",
    "re",
    "secrets",
    "shelve",
    "shlex",
    "shutil",
    "signal",
    "socket",
    "sqlite3",
    "stat",
    "statistics",
    "string",
    "struct",
    "subprocess",
    "sys",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "time",
    "timeit",
    "tokenize",
    "traceback",
    "types",
    "typing",
    "unicodedata",
    "unittest",
    "urllib.parse",
    "urllib.request",
    "uuid",
    "warnings",
    "weakref",
    "xml.etree.ElementTree",
    "zipfile",
    "zlib",
)
LONGEST_TEXT, LONGEST_SIGNATURE = 300, 120


def documentation() -> Iterator[dict[str, str]]:
    """Records in Alpaca's format: what is NAME in Python, and its signature with the first
    paragraph of its docstring.
    """
    seen_ids: set[int] = set()
    for module in MODULES:
        try:
            public = _public(importlib.import_module(module))
        except ImportError:
            continue
        for name, value in public:
            path = name if module == "builtins" else f"{module}.{name}"
            for qualified_name, member in (
                (path, value),
                *((f"{path}.{method}", member) for method, member in _methods(value)),
            ):
                answer = describe(qualified_name.rpartition(".")[2], member)
                if answer is not None and id(member) not in seen_ids:
                    seen_ids.add(id(member))
                    yield {"instruction": f"What is {qualified_name} in Python?", "output": answer}


def describe(name: str, value: Any) -> str | None:
    """`value` as in `help()`: its signature, and the first paragraph below; None without them."""
    try:
        signature = str(inspect.signature(value))
    except (ValueError, TypeError):
        return None
    paragraph = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    if not paragraph or paragraph.startswith(f"{name}(") or " at 0x" in signature:
        return None
    if len(paragraph) > LONGEST_TEXT or len(signature) > LONGEST_SIGNATURE:
        return None
    return f"{name}{signature}\n    {paragraph}"


def _public(module: ModuleType) -> list[tuple[str, Any]]:
    """Functions and classes of a module by name; attributes that a module makes on demand may warn,
    and are skipped.
    """
    namespace = vars(module)
    names = namespace.get("__all__") or [name for name in namespace if not name.startswith("_")]
    return [
        (name, namespace[name])
        for name in sorted(set(names))
        if name in namespace
        and (inspect.isroutine(namespace[name]) or inspect.isclass(namespace[name]))
    ]


def _methods(value: Any) -> list[tuple[str, Any]]:
    """A class's own public methods by name; nothing for a function."""
    if not inspect.isclass(value):
        return []
    return [
        (name, member)
        for name, member in sorted(vars(value).items())
        if not name.startswith("_")
        and inspect.isroutine(member)
        and not isinstance(member, (staticmethod, classmethod))
    ]
