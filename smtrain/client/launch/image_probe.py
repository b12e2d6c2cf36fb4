"""Report the contents of an image from inside: `python3 image_probe.py [ENGINE]` prints JSON.
Standard library only.

It lies next to the code of a job (`smtrain/`, `entrypoints/`), and asks what a job would find
there; with an engine it imports all that its stages import, which takes a while.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
STAGES = sorted(
    path.stem for path in (ROOT / "smtrain/stages").glob("[a-z]*.py") if path.stem != "base"
)
PROGRAMS = ("neuronx-cc", "neuron-ls", "nvidia-smi", "fi_info", "pip", "train")
WRITABLE_FOLDERS = ("/opt/ml", "/tmp")  # noqa: S108 - what stages write into
IMPORT_SECONDS = 300
# In a separate Python: an import that ends the process is a finding too.
_WALK = """
import importlib, json, pkgutil, sys
engine, faults = sys.argv[1], {}
import smtrain
others = ["smtrain.worker.engine." + name for name in ("native", "nxd") if name != engine]
def unknown(name):
    pass
names = [m.name for m in pkgutil.walk_packages(smtrain.__path__, "smtrain.", onerror=unknown)]
for name in [*names, "torch.distributed.run", *sys.argv[2:]]:
    if any(name == other or name.startswith(other + ".") for other in others):
        continue
    try:
        importlib.import_module(name)
    except BaseException as error:
        faults[name] = f"{type(error).__name__}: {error}"
print("FAULTS " + json.dumps(faults))
"""


def imports(engine: str, extra_modules: list[str]) -> dict[str, str]:
    """Modules of the stages, of an engine and of `extra_modules` that cannot be imported, each
    with the reason.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:2])}
    try:
        process = subprocess.run(
            [sys.executable, "-c", _WALK, engine, *extra_modules],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_SECONDS,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"smtrain": f"the imports took more than {IMPORT_SECONDS} s"}
    for line in process.stdout.splitlines():
        if line.startswith("FAULTS "):
            faults: dict[str, str] = json.loads(line.partition(" ")[2])
            return faults
    last = (process.stderr.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
    return {"smtrain": f"the imports ended Python: {last}"}


def packages() -> dict[str, str]:
    """Installed distributions, by name as an index spells it, with their versions."""
    distributions = (
        (distribution.metadata["Name"], distribution.version)
        for distribution in metadata.distributions()
    )
    return {
        re.sub(r"[-_.]+", "-", name).lower(): version for name, version in distributions if name
    }


def report_image(engine: str | None) -> dict[str, Any]:
    """The report as plain values."""
    sys.path[:0] = [str(ROOT), str(ROOT / "entrypoints")]
    import launch

    from smtrain.core.protocol.entrypoints import WORDS

    lists = {name: ROOT / "entrypoints" / f"{name}.txt" for name in ("requirements", "wheels")}
    # A library that travels with the code elsewhere; installed here, its own requirements may be
    # missing.
    names = {
        line.partition("==")[0]
        for stage in STAGES
        for line in launch.stage_requirements(lists["wheels"], stage)
    }
    bundled_modules = [
        name.replace("-", "_")
        for name in sorted(names)
        if importlib.util.find_spec(name.replace("-", "_"))
    ]
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "uid": os.getuid(),
        "packages": packages(),
        "lacking": {
            name: {
                word: launch.missing_requirements(launch.stage_requirements(file, word))
                for word in (*STAGES, *WORDS.values())
            }
            for name, file in lists.items()
        },
        "faults": imports(engine, bundled_modules) if engine else {},
        "programs": {name: shutil.which(name) for name in PROGRAMS},
        "unwritable": [folder for folder in WRITABLE_FOLDERS if not os.access(folder, os.W_OK)],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(report_image(sys.argv[1] if sys.argv[1:] else None)) + "\n")
