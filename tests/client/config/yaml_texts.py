"""YAML texts as fuzzers and hurried users write them, for hypothesis: scalars, keys, aliases, tags,
dates, nesting.
"""

from __future__ import annotations

from hypothesis import strategies as st

KEYS = (
    "name",
    "model",
    "path",
    "weights",
    "data",
    "text_column",
    "sources",
    "weight",
    "train",
    "lr",
    "steps",
    "betas",
    "seq_len",
    "validation",
    "fraction",
    "parallel",
    "tp",
    "compute",
    "max_run",
    "instance_type",
    "environment",
    "cluster",
    "time",
    "sbatch",
    "tags",
    "generate",
    "prompts",
    "evaluate",
    "machines",
    "track",
    "checkpoint",
    "local",
    "yes",
    "~",
    "2026-02-30",
    "1",
    "[a]",
    "{a: b}",
    "? a",
    "<<",
    "*a",
    "&a b",
    "{{ name }}",
    "",
    "!!int x",
    "=",
)
SCALARS = (
    "1",
    "-0",
    "0x_",
    "0b_",
    "0o9",
    "010",
    "1_0",
    "9" * 5000,
    "0x" + "f" * 5000,
    "1:30",
    "190:20:30",
    "1e5",
    "1e999",
    ".inf",
    "-.INF",
    ".nan",
    "1.",
    "._",
    "~",
    "null",
    "yes",
    "Off",
    "2026-02-28",
    "2026-02-30",
    "9999-99-99",
    "2026-01-01T25:00:00Z",
    "2026-1-1 1:1:1 +99:99",
    "x",
    "a: b",
    "'x",
    '"x',
    '"\\ud800"',
    '"\\0"',
    '"\\x41"',
    "\u2028",
    "ä",
    "\x85",
    "😀",
    "\ud800",
    "\0",
    "\x07",
    "%x",
    "@x",
    "`x`",
    "*a",
    "*b",
    "*nowhere",
    "*.jsonl",
    "&a x",
    "&a",
    "<<",
    "=",
    "|",
    ">-",
    "|\n  x",
    "!",
    "! 1",
    "!!int x",
    "!!float x",
    "!!bool x",
    "!!null x",
    "!!binary ???",
    "!!binary aGk=",
    "!!timestamp x",
    "!!python/name:os.system",
    "!!python/object/apply:os.system [ls]",
    "!foo x",
    "!!set {a}",
    "!!omap [a: 1]",
    "!!pairs [a: 1]",
    "!!str 1",
    "!!merge x",
    "!!value x",
    "{{ name }}",
    "{{name}}/x",
    "{% if x %}",
    "${HOME}",
    "~nobody/x",
    "~/x",
    "s3://bucket/x",
    "hf://x/y",
    "demo://tiny-llama",
    "#",
    "---",
    "...",
    "\t",
    "- x",
    "[",
    "]",
    "{",
    "}",
    ",",
    "? x",
    ": x",
    "auto",
    "ml.trn1.2xlarge",
)
TAGS = (
    "",
    "",
    "",
    "!!map ",
    "!!seq ",
    "!!str ",
    "!!set ",
    "!!omap ",
    "!x ",
    "&a ",
    "&b ",
    "&a &b ",
)


def _flow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.lists(st.tuples(st.sampled_from(KEYS), inner), max_size=4)
    tag = st.sampled_from(TAGS)
    return st.one_of(
        st.builds(
            lambda tag, items: f"{tag}[{', '.join(items)}]", tag, st.lists(inner, max_size=9)
        ),
        st.builds(
            lambda tag, items: f"{tag}{{{', '.join(f'{key}: {value}' for key, value in items)}}}",
            tag,
            pairs,
        ),
    )


VALUES = st.recursive(
    st.one_of(st.sampled_from(SCALARS), st.text(max_size=8)), _flow, max_leaves=12
)
_OPEN = ("[", "{", "- ", "? ", "a: ", "!!seq [", "{a: ")
NESTED = st.builds(
    lambda mark, depth, value: mark * depth + value,
    st.sampled_from(_OPEN),
    st.integers(0, 3000),
    VALUES,
)
LAUGHS = st.builds(
    lambda width, depth, key: "".join(
        f"{key}{level}: &l{level} [{', '.join([f'*l{level - 1}' if level else 'ha'] * width)}]\n"
        for level in range(depth)
    ),
    st.integers(1, 20),
    st.integers(1, 40),
    st.sampled_from(KEYS),
)
MERGES = st.builds(
    lambda depth: (
        "m0: &m0 {a: b}\n"
        + "".join(f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}], k{i}: 1}}\n" for i in range(1, depth))
    ),
    st.integers(1, 40),
)
_INDENT = ("  ", "  ", "  ", "    ", "\t", "")
_BLOCK = st.builds(
    lambda section, rows: (
        f"{section}:\n" + "".join(f"{indent}{key}: {value}\n" for indent, key, value in rows)
    ),
    st.sampled_from(KEYS),
    st.lists(st.tuples(st.sampled_from(_INDENT), st.sampled_from(KEYS), VALUES), max_size=5),
)
_LINE = st.builds("{}: {}\n".format, st.sampled_from(KEYS), st.one_of(VALUES, NESTED))
_BETWEEN = st.sampled_from(["---\n", "...\n", "\n", "# x\n"])
TEXTS = st.lists(st.one_of(_BLOCK, _BLOCK, _LINE, LAUGHS, MERGES, _BETWEEN), max_size=6).map(
    "".join
)
"""A whole file, to stand behind a valid config."""
_KEY = st.sampled_from(KEYS)
_NAMES = st.one_of(st.builds("{}.{}".format, _KEY, _KEY), _KEY, st.text(max_size=5))
ASSIGNMENTS = st.builds("{}={}".format, _NAMES, st.one_of(VALUES, NESTED))
"""Texts for `--set`."""
