"""What pyproject.toml cannot say: the entry scripts and the pages of the documentation, folders of
the repository, are a part of what is installed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDER = "entrypoints"
DOCS, MANUAL = Path("docs"), "manual"
PAGES = ("*.md", "reference/*.md")
"""Pages that `smtrain help` shows."""


class BuildPy(build_py):
    """Puts `entrypoints/` into `smtrain/entrypoints`, where smtrain.client.launch.bundle looks for
    it first, and pages of `docs/` into `smtrain/manual`, where smtrain.cli.manual does.
    """

    def run(self) -> None:
        """Copy the package as ever, then the scripts and the pages."""
        super().run()
        if self.editable_mode:  # which reads them where they are
            return
        shutil.copytree(
            FOLDER,
            Path(self.build_lib, "smtrain", FOLDER),
            ignore=shutil.ignore_patterns("__pycache__"),
            dirs_exist_ok=True,
        )
        for page in pages():
            copy = Path(self.build_lib, "smtrain", MANUAL, page.relative_to(DOCS))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(page, copy)

    def get_source_files(self) -> list[str]:
        """With the scripts and the pages, so that an sdist has them."""
        scripts = [
            str(p) for p in Path(FOLDER).rglob("*") if p.is_file() and "__pycache__" not in p.parts
        ]
        return [*super().get_source_files(), *sorted(scripts), *map(str, pages())]


def pages() -> list[Path]:
    """The pages that are installed."""
    return sorted(page for pattern in PAGES for page in DOCS.glob(pattern))


setup(cmdclass={"build_py": BuildPy})
