"""Compare our reader of Wikipedia dumps with WikiExtractor: documents, words, remaining markup.

--dump is a `.xml` or `.xml.bz2` file; gensim's wheel has real ones
(gensim/test/test_data/enwiki-latest-pages-*.bz2, to be renamed to .xml.bz2). WikiExtractor needs
the element <siteinfo>, which some shortened dumps lack; it runs in a separate Python, --python, in
which it is installed (`pip install wikiextractor`). Its licence is the AGPL, and it is not part of
this project. Both leave templates out (`--no-templates`). Pairs of figures are ours and
WikiExtractor's.

  documents        with a text; `only_ours`, `only_theirs`: some that the other does not have, by title
  words            of the texts of documents that both have; `theirs_in_ours`: the share of WikiExtractor's words that
                   ours has as often in the same document; `ours_in_theirs` the other way
  markup           remaining pieces of wikitext or HTML, by kind
  cpu_seconds      of one process each

--show N prints the documents that differ most, with the lines of each that the other does not have.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smtrain.worker.data.read.reading import read_block
from smtrain.worker.data.read.sources import find_files
from smtrain.worker.data.read.split_files import cut_file

MARKUP = {
    "{{": r"\{\{",
    "}}": r"\}\}",
    "[[": r"\[\[",
    "]]": r"\]\]",
    "{|": r"\{\|",
    "|}": r"\|\}",
    "'''": r"'''",
    "<tag>": r"</?[a-z]+(?: [^<>]*)?/?>",
    "&entity;": r"&(?:[a-z]+|#\d+);",
    "==": r"^=+ .* =+$",
    "rows |": r"^\|",
}
_WORD = re.compile(r"\w+")


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--dump", type=Path, required=True)
    parser.add_argument(
        "--python", default=sys.executable, help="of the environment that has wikiextractor"
    )
    parser.add_argument("--show", type=int, default=0, help="documents that differ most")
    options = parser.parse_args()
    start = resource.getrusage(resource.RUSAGE_SELF)
    our_texts = dict(split(read(options.dump)))
    end = resource.getrusage(resource.RUSAGE_SELF)
    reference_texts, seconds = extract_by_wikiextractor(options.python, options.dump)
    common_titles = sorted({*our_texts} & {*reference_texts})
    words = {
        title: (
            Counter(_WORD.findall(our_texts[title])),
            Counter(_WORD.findall(reference_texts[title])),
        )
        for title in common_titles
    }
    shared_words = sum((a & b).total() for a, b in words.values())
    result: dict[str, Any] = {
        "documents": [len(our_texts), len(reference_texts)],
        "only_ours": sorted({*our_texts} - {*reference_texts})[:5],
        "only_theirs": sorted({*reference_texts} - {*our_texts})[:5],
        "words": [
            sum(a.total() for a, _ in words.values()),
            sum(b.total() for _, b in words.values()),
        ],
        "theirs_in_ours": round(
            shared_words / max(1, sum(b.total() for _, b in words.values())), 4
        ),
        "ours_in_theirs": round(
            shared_words / max(1, sum(a.total() for a, _ in words.values())), 4
        ),
        "markup": {
            kind: [
                len(re.findall(p, "\n".join(texts.values()), re.M))
                for texts in (our_texts, reference_texts)
            ]
            for kind, p in MARKUP.items()
        },
        "cpu_seconds": [round(end.ru_utime - start.ru_utime, 1), round(seconds, 1)],
    }
    print(
        json.dumps(result) if options.json else "\n".join(f"{k:16} {v}" for k, v in result.items())
    )
    titles_by_difference = sorted(
        common_titles,
        key=lambda title: (
            -((words[title][0] | words[title][1]) - (words[title][0] & words[title][1])).total()
        ),
    )
    for title in titles_by_difference[: options.show]:
        lines = [set(text[title].split("\n")) for text in (our_texts, reference_texts)]
        print(f"\n=== {title}")
        for mark, text, other_lines in (
            ("ours  ", our_texts, lines[1]),
            ("theirs", reference_texts, lines[0]),
        ):
            for line in [line for line in text[title].split("\n") if line not in other_lines][:25]:
                print(f"{mark} {line[:160]}")


def read(dump: Path) -> list[str]:
    """Our texts."""
    form: Any = "mediawiki"
    files = find_files(dump, form)
    return [
        text
        for file in files
        for block in cut_file(file)
        for text in read_block(block).texts.to_pylist()
    ]


def split(texts: list[str]) -> Iterator[tuple[str, str]]:
    """Title and text of each document that has one."""
    for text in texts:
        title, _, body = text.partition("\n")
        if body.strip():
            yield title.strip(), body.strip()


def extract_by_wikiextractor(python: str, dump: Path) -> tuple[dict[str, str], float]:
    """WikiExtractor's texts by title, and its processor seconds."""
    with tempfile.TemporaryDirectory() as folder:
        usage_before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [
                python,
                "-m",
                "wikiextractor.WikiExtractor",
                "--no-templates",
                "-q",
                "--json",
                "--processes",
                "1",
                "-o",
                folder,
                str(dump),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        usage_after = resource.getrusage(resource.RUSAGE_CHILDREN)
        rows = [
            json.loads(line)
            for path in sorted(Path(folder).rglob("wiki_*"))
            for line in path.open()
        ]
    return {
        row["title"]: html.unescape(row["text"]) for row in rows if row["text"].strip()
    }, usage_after.ru_utime - usage_before.ru_utime


if __name__ == "__main__":
    main()
