"""What pyproject.toml cannot say: the entry scripts, a folder of the repository, are a part of what
is installed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDER = "entrypoints"


class BuildPy(build_py):
    """Puts `entrypoints/` into `smtrain/entrypoints`, where smtrain.client.launch.bundle looks for
    it first.
    """

    def run(self) -> None:
        """Copy the package as ever, then the scripts."""
        super().run()
        if self.editable_mode:  # which reads them where they are
            return
        shutil.copytree(
            FOLDER,
            Path(self.build_lib, "smtrain", FOLDER),
            ignore=shutil.ignore_patterns("__pycache__"),
            dirs_exist_ok=True,
        )

    def get_source_files(self) -> list[str]:
        """With the scripts, so that an sdist has them."""
        scripts = [
            str(p) for p in Path(FOLDER).rglob("*") if p.is_file() and "__pycache__" not in p.parts
        ]
        return [*super().get_source_files(), *sorted(scripts)]


setup(cmdclass={"build_py": BuildPy})
