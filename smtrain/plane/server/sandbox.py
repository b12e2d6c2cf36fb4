"""One host of a job: a process that sets up the host, runs the leader in it, and ends all its
processes.

    python -m smtrain.plane.server.sandbox SPEC.json STATUS_FD

If the kernel allows, the leader runs in its own mount, UTS and PID namespaces (and a user namespace
if we are not root): the host's folder is /opt/ml, /etc/hosts and the host name are its own, and it
is process 1, so that the kernel ends every process it started when it ends. Mounts vanish with the
namespace. Else the leader runs as a plain session leader, with SMTRAIN_ML_ROOT naming the host's
folder.

It reads `go`, `term` (SIGTERM to the leader only, as `docker stop`) and `kill` from stdin. When
stdin ends, the control plane has ended and everything is killed. It writes JSON lines to STATUS_FD:
{"ready": ...} and {"exit": code}. The hosts of an isolated job share a network with only a loopback
interface; file system daemons stay outside it.

Imports only the standard library, as it starts for every host and must be quick.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from smtrain.plane.server import processes
from smtrain.plane.server.namespaces import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    LINUX,
    MNT_DETACH,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    enter_namespaces,
    libc,
    mount,
    open_network,
)

MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
MOUNT_SECONDS = 60.0


class Supervisor:
    """Sets up one host from its spec, then runs and ends the leader."""

    def __init__(self, spec: dict[str, Any], status: int) -> None:
        self.spec, self.status = spec, status
        self.isolated = False
        self.daemon: subprocess.Popen[bytes] | None = None
        self.leader = 0
        self._commands = b""

    def run(self) -> None:
        """Set up the host, report it, follow commands until it has ended, and clean up."""
        refusal, mounts = self._prepare()
        self._say({"ready": {"refusal": refusal, "fastfile": mounts}})
        try:
            self._obey()
        finally:
            if self.daemon:
                self.daemon.kill()
                self.daemon.wait()
            self._tidy()

    def _prepare(self) -> tuple[str | None, dict[str, str | None]]:
        """Set up the host.

        Returns why it is not isolated, and by channel why it is not mounted, or None.
        """
        refusal: str | None = None
        try:
            if not self.spec["namespaces"]:
                raise OSError("namespaces are switched off")
            holder = self.spec["network"]
            network = open_network(holder) if holder else None
            enter_namespaces(
                self.spec["ml"], self.spec["hosts_file"], self.spec["hostname"], holder
            )
            self.isolated = True
            mounts = self._mount_channels()
            if network is not None:
                libc("setns", network, CLONE_NEWNET)
        except OSError as error:
            refusal = error.strerror or str(error)
            mounts = self._mount_channels()
        if self.isolated:
            # Only after the file system daemons have started: the next child becomes process 1 and
            # must be the leader.
            with contextlib.suppress(OSError):
                libc("unshare", CLONE_NEWPID)
        if LINUX:
            # Without a PID namespace, processes that the leader leaves become our children and are
            # ended.
            libc("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return refusal, mounts

    def _tidy(self) -> None:
        """Undo what outlives this process: nothing here, as mounts end with their namespace."""

    def _say(self, message: dict[str, Any]) -> None:
        os.write(self.status, json.dumps(message).encode() + b"\n")

    def _mount_channels(self) -> dict[str, str | None]:
        """Start the lazy read-only mounts, all by one process.

        Returns for each the reason of a failure, or None.
        """
        spec = self.spec["fastfile"]
        channels = spec["channels"]
        refusal = None if self.isolated else "it needs a mount namespace"
        if refusal is None and channels:
            try:
                os.close(os.open("/dev/fuse", os.O_RDWR))
            except OSError as error:
                refusal = f"/dev/fuse cannot be opened ({error.strerror})"
        if refusal or not channels:
            return dict.fromkeys(channels, refusal)
        devices = {
            name: os.stat(channel["mountpoint"]).st_dev for name, channel in channels.items()
        }
        deadline = time.monotonic() + MOUNT_SECONDS
        servers = self._start_daemon(spec, deadline)
        return {
            name: self._await_mount(channel, servers.get(name, 0), devices[name], deadline)
            for name, channel in channels.items()
        }

    def _start_daemon(self, spec: dict[str, Any], deadline: float) -> dict[str, int]:
        """The process of every channel; empty if the daemon failed."""
        with open(spec["log"], "wb") as log:
            self.daemon = subprocess.Popen(
                spec["command"],
                cwd=self.spec["package_parent"],
                env=spec["env"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                preexec_fn=_die_with_parent,
            )
        assert self.daemon.stdout
        with self.daemon.stdout as output:
            ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
            line = output.readline() if ready else b""
        if not line:
            self.daemon.kill()
            self.daemon.wait()
        return json.loads(line) if line else {}

    def _await_mount(
        self, channel: dict[str, Any], server: int, device: int, deadline: float
    ) -> str | None:
        while server and time.monotonic() < deadline:
            if os.stat(channel["mountpoint"]).st_dev != device:
                return None
            if not processes.is_running(server):
                break
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            if server:
                os.kill(server, signal.SIGKILL)
        # A mount that appears too late would hide the download that replaces it.
        with contextlib.suppress(OSError):
            libc("umount2", os.fsencode(channel["mountpoint"]), MNT_DETACH)
        for log in (channel["log"], self.spec["fastfile"]["log"]):
            with contextlib.suppress(OSError):
                if lines := Path(log).read_text(errors="replace").strip().splitlines():
                    return lines[-1]
        return f"the mount did not appear within {MOUNT_SECONDS:.0f} s"

    def _obey(self) -> None:
        """Follow commands until the leader or the control plane has ended."""
        waker, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if LINUX else os.pipe()
        os.set_blocking(waker, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select([0, waker], [], [])
            if waker in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(waker, 512)
                if self.leader and (code := self._reap_leader()) is not None:
                    self._end_rest()
                    self._say({"exit": code})
                    return
            if 0 in ready and not self._command():
                self._kill()
                self._end_rest()
                return

    def _command(self) -> bool:
        """Execute commands from standard input; False at its end."""
        data = os.read(0, 512)
        self._commands += data
        while b"\n" in self._commands:
            command, _, self._commands = self._commands.partition(b"\n")
            self._do(command)
        return bool(data)

    def _do(self, command: bytes) -> None:
        if command == b"go":
            self.leader = self._start_leader()
        elif command == b"term" and self.leader:
            os.kill(self.leader, signal.SIGTERM)
        elif command == b"kill" and self.leader:
            self._kill()

    def _reap_leader(self) -> int | None:
        """The leader's exit code as docker gives it (128 + signal); None while it runs."""
        pid, status = os.waitpid(self.leader, os.WNOHANG)
        if pid == 0:
            return None
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _kill(self) -> None:
        if self.leader:
            for kill in (os.kill, os.killpg):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(self.leader, signal.SIGKILL)

    def _end_rest(self) -> None:
        """Kill processes that the leader has left. In a PID namespace the kernel has done it."""
        if self.leader:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.leader, signal.SIGKILL)
        spared_pids = {self.daemon.pid} if self.daemon else set()
        while LINUX and (orphans := processes.children_of(os.getpid()) - spared_pids):
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in orphans:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _start_leader(self) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                self._become_leader()
            except BaseException as error:
                os.write(1, f"smtrain: {error}\n".encode())
            os._exit(127)
        # Close our end of the pipe, or its reader would wait for us after the job's end.
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.close(null)
        return pid

    def _become_leader(self) -> None:
        _die_with_parent()
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(1, 2)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.umask(0o022)
        env = dict(self.spec["env"])
        if self.isolated:
            # /proc should show only this host's processes; if the kernel refuses, it shows more.
            with contextlib.suppress(OSError):
                libc("unshare", CLONE_NEWNS)
                mount("proc", "/proc", "proc", MS_NOSUID_NODEV_NOEXEC)
            env["TMPDIR"] = "/opt/ml/.tmp"
            os.chdir("/opt/ml/code")
        else:
            root = self.spec["ml"]
            env.update(SMTRAIN_ML_ROOT=root, SMTRAIN_MASTER_ADDR="127.0.0.1", TMPDIR=f"{root}/.tmp")
            cache = "SAGEMAKER_MANAGED_WARMPOOL_CACHE_DIRECTORY"
            if cache in env:
                env[cache] = root + env[cache].removeprefix("/opt/ml")
            os.chdir(f"{root}/code")
        argv = self.spec["argv"]
        try:
            os.execvpe(argv[0], argv, env)  # noqa: S606
        except FileNotFoundError:
            raise OSError(
                f"ContainerEntrypoint {argv[0]!r} is not found on the PATH {env['PATH']}"
            ) from None


def _die_with_parent() -> None:
    if LINUX:
        libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    # Ctrl-C of a terminal is for the control plane, not for us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec, status = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    os.set_inheritable(status, False)  # the job must not inherit it: its end means ours
    Supervisor(spec, status).run()


if __name__ == "__main__":
    main()
