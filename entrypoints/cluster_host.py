"""A machine that acts as a host of SageMaker: a node of a Slurm cluster, or a pod of PAI-DLC.

It gets the folder that the stages take for /opt/ml, and each line of the launcher gets its time.
Standard library only: no package is there yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

LINE_BYTES = 256 << 10
FAILURE_BYTES = 4096
"""Bytes to read of output/failure at most; SageMaker shows 1,024 characters of it."""


def host_name(rank: int) -> str:
    """The name of a host, as SageMaker names it."""
    return f"algo-{rank + 1}"


def make_folders(ml: Path, rank: int, hosts: int, interface: str | None) -> None:
    """Make the folders of a host, empty, and describe the hosts of its job."""
    shutil.rmtree(ml, ignore_errors=True)
    for folder in ("input/config", "input/data", "output", "code"):
        (ml / folder).mkdir(parents=True)
    resources: dict[str, Any] = {
        "current_host": host_name(rank),
        "hosts": [host_name(n) for n in range(hosts)],
    }
    if interface:
        resources["network_interface_name"] = interface
    (ml / "input/config/resourceconfig.json").write_text(json.dumps(resources), "utf-8")


def link_inputs(ml: Path, channels: Iterable[tuple[str, Path]], remedy: str) -> None:
    """Link the input channels to their files.

    Raises SystemExit with the remedy if one is not there.
    """
    for name, source in channels:
        place = ml / "input/data" / name
        if source.is_file():  # a channel is a folder
            place.mkdir()
            place = place / source.name
        elif not source.exists():
            raise SystemExit(
                f"{source}: channel {name} is not there on {socket.gethostname()}; {remedy}"
            )
        place.symlink_to(source)


def link_folders(ml: Path, folders: Mapping[str, Path]) -> None:
    """Link folders below /opt/ml to target folders, made if needed."""
    for name, target in folders.items():
        target.mkdir(parents=True, exist_ok=True)
        (ml / name).symlink_to(target.resolve())


def read_failure(ml: Path) -> str:
    """The reason in output/failure; empty unless it is a regular file with text.

    User code may leave a pipe or a link there: a pipe would block this host, and /dev/zero would
    fill its memory.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(ml / "output/failure", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return file.read(FAILURE_BYTES).decode("utf-8", "replace").strip(" \t\r\n\0")
    return ""


def interface_to(address: str) -> str | None:
    """The network interface by which this machine reaches an address; None if that cannot be found
    out.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        local_address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                if (
                    socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])
                    == local_address
                ):  # SIOCGIFADDR
                    return name
    return None


def run(
    command: list[str],
    out: BinaryIO,
    environment: Mapping[str, str],
    on_stop: Callable[[], object],
    *,
    new_session: bool = False,
) -> tuple[int, str]:
    """Run a command, write each of its lines with the time, and forward SIGTERM; `on_stop` is
    called then.

    `new_session`: all processes that it has started get the signal too, as a shell does not pass it
    on. Returns its exit status, or 128 + the signal, and the reason why the last lines are lost,
    else an empty text.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=new_session,
    )

    def stop(_number: int, _frame: object) -> None:
        on_stop()
        if new_session:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        else:
            process.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    output = process.stdout
    assert output
    lost_lines, reason = 0, ""
    for line in iter(
        lambda: output.readline(LINE_BYTES), b""
    ):  # a longer line continues in the next entry
        stamp = (
            datetime.now(timezone.utc)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z")
            .encode()
        )
        entry = stamp + b" " + line.rstrip(b"\r\n") + b"\n"
        if lost_lines:
            entry = stamp + f" ({lost_lines} lines were lost here: {reason})\n".encode() + entry
        try:
            written_bytes = out.write(entry)
            lost_lines = 0 if written_bytes == len(entry) else lost_lines + 1
        except (
            OSError
        ) as error:  # a full disk: drop the line; the stage itself decides whether to stop
            lost_lines, reason = lost_lines + 1, str(error.strerror)
    status = process.wait()
    return (status if status >= 0 else 128 - status), (reason if lost_lines else "")
