"""The kernel's namespaces for the hosts of a job, and the network of an isolated job.

    python -m smtrain.plane.server.namespaces

holds a network with only a loopback interface until its stdin ends. It writes a JSON line:
{"refusal": null}, or the reason why the kernel refuses. Imports only the standard library, as it
starts with every host.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x4000000, 0x10000000, 0x20000000
CLONE_NEWNET = 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
LINUX = sys.platform.startswith("linux")


def libc(name: str, *arguments: Any) -> None:
    """Call a libc function. Raises OSError with its errno."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    def text(value: str | None) -> bytes | None:
        return None if value is None else os.fsencode(value)

    libc("mount", text(source), text(target), text(kind), ctypes.c_ulong(flags), text(data))


def enter_namespaces(ml: str, hosts_file: str, hostname: str, holder: int = 0) -> None:
    """Give this process the host's view of files and names. Raises OSError if the kernel refuses.

    `holder` is the process that holds the job's network; a host must be in its user namespace to
    enter it.
    """
    if not LINUX:
        raise OSError("this system has no mount namespaces")
    flags = CLONE_NEWNS | CLONE_NEWUTS
    if os.getuid() == 0:
        libc("unshare", flags)
    elif holder:
        users = os.open(f"/proc/{holder}/ns/user", os.O_RDONLY)
        libc("setns", users, CLONE_NEWUSER)
        os.close(users)
        libc("unshare", flags)
    else:
        _unshare_as_user(flags)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    if not os.path.isdir("/opt/ml"):
        _make_opt_ml()
    mount(ml, "/opt/ml", None, MS_BIND)
    mount(hosts_file, "/etc/hosts", None, MS_BIND)
    mount("tmpfs", "/dev/shm", "tmpfs", 2 | 4, "mode=1777")  # noqa: S108
    name = hostname.encode()
    libc("sethostname", name, len(name))


def _make_opt_ml() -> None:
    """Cover /opt, in this namespace only, with a tmpfs of the same entries and an empty /opt/ml."""
    if not os.path.isdir("/opt"):
        raise OSError("this machine has no folder /opt to mount /opt/ml in")
    # A tmpfs on /opt would hide the entries to be bound into it: fill it at another folder, then
    # bind it to /opt.
    stage = next(folder for folder in ("/mnt", "/media", "/srv") if os.path.isdir(folder))
    mount("tmpfs", stage, "tmpfs", 0, "mode=755")
    for name in os.listdir("/opt"):
        source, target = f"/opt/{name}", f"{stage}/{name}"
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
            continue
        if os.path.isdir(source):
            os.mkdir(target)
        else:
            open(target, "w").close()
        mount(source, target, None, MS_BIND | MS_REC)
    os.mkdir(f"{stage}/ml")
    mount(stage, "/opt", None, MS_BIND | MS_REC)
    libc("umount2", stage.encode(), MNT_DETACH)


def _unshare_as_user(flags: int) -> None:
    """New namespaces without being root: as root of a new user namespace."""
    user, group = os.getuid(), os.getgid()
    libc("unshare", CLONE_NEWUSER | flags)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def open_network(holder: int) -> int:
    """A descriptor of a process's network, for setns."""
    return os.open(f"/proc/{holder}/ns/net", os.O_RDONLY)


def make_network() -> None:
    """Move this process to a new network with only loopback.

    Raises OSError if the kernel refuses.
    """
    if not LINUX:
        raise OSError("this system has no network namespaces")
    if os.getuid() == 0:
        libc("unshare", CLONE_NEWNET)
    else:
        _unshare_as_user(CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP | IFF_RUNNING))


PACKAGE_PARENT = Path(__file__).resolve().parents[3]


class HostNetwork:
    """A network namespace that the hosts of one job share.

    Raises OSError if this machine refuses.
    """

    def __init__(self) -> None:
        from smtrain.plane.client import (
            server_environment,
        )  # not at the top: this module starts with every host

        self._holder = subprocess.Popen(
            [sys.executable, "-m", "smtrain.plane.server.namespaces"],
            cwd=PACKAGE_PARENT,
            env=server_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout
        with self._holder.stdout as output:
            line = output.readline()
        refusal = json.loads(line)["refusal"] if line else "the process that was to hold it ended"
        if refusal:
            self.end()
            raise OSError(refusal)

    @property
    def pid(self) -> int:
        return self._holder.pid

    def end(self) -> None:
        """Release it; the kernel removes it with its last process."""
        assert self._holder.stdin
        with contextlib.suppress(BrokenPipeError):
            self._holder.stdin.close()
        self._holder.wait()


def isolation_refusal(namespaces: bool) -> str | None:
    """A sentence if a job cannot be isolated on this machine; None if it can."""
    try:
        if not namespaces:
            raise OSError("it was started without namespaces")
        HostNetwork().end()
    except OSError as error:
        return (
            "EnableNetworkIsolation cannot be honoured: smtrain's local control plane has no"
            f" network namespace for the job ({error.strerror or error}); leave network isolation"
            " out here"
        )
    return None


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    refusal = None
    try:
        make_network()
    except OSError as error:
        refusal = error.strerror or str(error)
    print(json.dumps({"refusal": refusal}), flush=True)
    if refusal is None:
        sys.stdin.read()


if __name__ == "__main__":
    main()
