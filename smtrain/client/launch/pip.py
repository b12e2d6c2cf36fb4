"""pip, asked for wheels that another machine will install."""

from __future__ import annotations

import subprocess
import sys


def options(python: str, machine: str) -> list[str]:
    """Options that choose wheels for CPython `python` ("3.12", or "312" as pip shortens it) on Linux on `machine`."""
    platforms = [f"--platform={tag}_{machine}" for tag in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
    return ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]


def run(command: str, *arguments: str, seconds: int) -> str:
    """Run a pip command and return its output. Raises OSError with pip's reason, or after `seconds` without an end."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", command, "-q", "--disable-pip-version-check", "--no-input", *arguments],
            capture_output=True, text=True, errors="replace", timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer from the package index within {seconds} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise OSError(errors[-1].removeprefix("ERROR: "))
    return done.stdout
