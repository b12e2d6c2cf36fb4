"""A stand-in for Alibaba Cloud: PAI-DLC's API and OSS on 127.0.0.1, whose jobs are processes of
this machine.

It is ours, not Alibaba's: it answers what the SDKs ask (alibabacloud-pai-dlc20201203 1.11.6, oss2
2.18) in the form that their references describe. Every pod is one process with PAI-DLC's variables,
ended by SIGTERM and after the grace period by SIGKILL. Buckets are folders; a mount is a link to
one, and `_MOUNT_SCRIPT` keeps Python to what ossfs can do.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_REQUIRED_KEYS = ("DisplayName", "JobType", "JobSpecs", "UserCommand")
# What every Python of a pod loads: OSS has no append, no links and no locks, and a rename of a
# folder copies each file.
_MOUNT_SCRIPT = """
import os, sys
ROOT = os.environ.get("STAND_IN_OSS")
def below(path):
    return isinstance(path, (str, os.PathLike)) and os.path.realpath(path).startswith(ROOT + os.sep)
def rule(event, args):
    if event == "open" and below(args[0]):
        mode, flags = str(args[1] or ""), args[2] or 0
        if "a" in mode or "+" in mode or flags & os.O_APPEND or (flags & os.O_ACCMODE) == os.O_RDWR:
            raise PermissionError(1, "no append or change of an object on an OSS mount", str(args[0]))
    elif event == "os.rename" and (below(args[0]) or below(args[1])) and os.path.isdir(args[0]):
        raise PermissionError(1, "no rename of a folder on an OSS mount", str(args[0]))
    elif event in ("os.link", "os.symlink") and below(args[1]):
        raise PermissionError(1, "no link on an OSS mount", str(args[1]))
    elif event in ("fcntl.flock", "fcntl.lockf") and below(f"/proc/self/fd/{args[0]}"):
        raise OSError(95, "no lock on an OSS mount")
if ROOT:
    sys.addaudithook(rule)
"""


def _utc_stamp() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class StandInPod:
    """One pod: its process, and its lines with the times at which they came."""

    id: str
    type: str
    process: subprocess.Popen[bytes]
    began: str
    lines: list[tuple[float, str]] = field(default_factory=list)

    def read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as output:
            for line in output:
                self.lines.append((time.time(), line.decode(errors="replace").rstrip("\n")))

    @property
    def status(self) -> str:
        code = self.process.poll()
        return "Running" if code is None else "Succeeded" if code == 0 else "Failed"


@dataclass
class StandInJob:
    """One job, as GetJob gives it."""

    id: str
    request: dict[str, Any]
    created_at: str
    pods: list[StandInPod] = field(default_factory=list)
    status: str = "Creating"
    ended_at: str | None = None
    history: list[dict[str, str]] = field(default_factory=list)

    def become(self, status: str) -> None:
        if status != self.status:
            self.status = status
            self.history.append({"Status": status, "StartTime": _utc_stamp()})

    def answer(self) -> dict[str, Any]:
        request_keys = (
            "DisplayName",
            "JobType",
            "JobSpecs",
            "UserCommand",
            "Envs",
            "Settings",
            "WorkspaceId",
            "ResourceId",
        )
        times = {"GmtCreateTime": self.created_at, "GmtFinishTime": self.ended_at}
        times["GmtRunningTime"] = self.pods[0].began if self.pods else None
        pods = [
            {
                "PodId": pod.id,
                "PodUid": f"{pod.process.pid:08d}-uid",
                "Type": pod.type,
                "Status": pod.status,
                "GmtStartTime": pod.began,
            }
            for pod in self.pods
        ]
        return {
            "JobId": self.id,
            "Status": self.status,
            "Pods": pods,
            "StatusHistory": self.history,
            **{key: self.request[key] for key in request_keys if key in self.request},
            **{key: value for key, value in times.items() if value},
        }


class RefusedError(Exception):
    """An error as an answer: its HTTP status, code and message."""


class StandIn:
    """The server.

    `with StandIn(folder) as cloud:` starts it; what still runs at the end is killed.
    """

    def __init__(self, root: Path, variables: Mapping[str, str], ports: Iterator[int]) -> None:
        """`variables`: the environment of the image; `ports`: a free one for each job."""
        self.root, self.variables = root, dict(variables)
        self.jobs: dict[str, StandInJob] = {}
        self.asked: list[tuple[str, str]] = []
        """Method and path of every call."""
        self.busy = 0
        """Number of further calls to answer with 503."""
        self.refuses = ""
        """The reason to refuse a new job."""
        self.held = False
        """Whether new jobs wait in the queue."""
        self.types = ["ecs.g7.2xlarge", "ecs.gn7e-c16g1.16xlarge"]
        self._lock = threading.RLock()
        self._ports = ports
        (root / "oss").mkdir(parents=True)
        for folder in ("site", "tmp"):
            (root / folder).mkdir()
        (root / "site/sitecustomize.py").write_text(_MOUNT_SCRIPT)

    def __enter__(self) -> StandIn:
        handler = type("Handler", (_Handler,), {"cloud": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.jobs.values():
            self._kill(job)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def bucket(self, name: str) -> Path:
        """The folder of a bucket, which is made."""
        folder = self.root / "oss" / name
        folder.mkdir(exist_ok=True)
        return folder

    # ---- jobs
    def create(self, request: dict[str, Any]) -> str:
        for key in _REQUIRED_KEYS:
            if not request.get(key):
                raise RefusedError(400, "InvalidParameter", f"{key} is required")
        if self.refuses:
            raise RefusedError(400, "QuotaExceeded", self.refuses)
        id_ = f"dlc{hashlib.sha256(os.urandom(8)).hexdigest()[:13]}"
        with self._lock:
            job = self.jobs[id_] = StandInJob(id_, request, _utc_stamp())
            job.become("Queuing")
            if not self.held:
                self.start(job)
        return id_

    def start(self, job: StandInJob) -> None:
        """Give a job its machines."""
        for source in job.request.get("DataSources", []):
            self._mount(source)
        roles = [
            (spec["Type"].lower(), n)
            for spec in job.request["JobSpecs"]
            for n in range(spec["PodCount"])
        ]
        port = next(self._ports)
        oss = str((self.root / "oss").resolve())
        paths = filter(None, [str(self.root / "site"), self.variables.get("PYTHONPATH")])
        for rank, (role, number) in enumerate(roles):
            gpus = int(job.request["JobSpecs"][0].get("ResourceConfig", {}).get("GPU", 1))
            environment = {
                **self.variables,
                "TMPDIR": str(self.root / "tmp"),
                **job.request.get("Envs", {}),
                "STAND_IN_OSS": oss,
                "PYTHONPATH": os.pathsep.join(paths),
                "WORLD_SIZE": str(len(roles)),
                "RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "NPROC_PER_NODE": str(gpus),
            }
            process = subprocess.Popen(
                ["sh", "-c", job.request["UserCommand"]],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=self.root,
            )
            pod = StandInPod(f"{job.id}-{role}-{number}", role, process, _utc_stamp())
            threading.Thread(target=pod.read, daemon=True).start()
            job.pods.append(pod)
        job.become("Running")
        threading.Thread(target=self._watch, args=(job,), daemon=True).start()

    def stop(self, id_: str) -> None:
        job = self.find(id_)
        if job.status == "Queuing":
            job.ended_at = _utc_stamp()
            job.become("Stopped")
        elif job.status == "Running":
            job.become("Stopping")
            for pod in job.pods:
                if pod.process.poll() is None:
                    pod.process.send_signal(signal.SIGTERM)
            grace = job.request.get("Settings", {}).get("TerminationGracePeriodSeconds", 30)
            threading.Timer(grace, self._kill, (job,)).start()

    def find(self, id_: str) -> StandInJob:
        if id_ not in self.jobs:
            raise RefusedError(404, "JobNotExists", f"job {id_} does not exist")
        return self.jobs[id_]

    def lines(self, id_: str, pod_id: str, query: Mapping[str, str]) -> list[str]:
        pod = next((pod for pod in self.find(id_).pods if pod.id == pod_id), None)
        if pod is None:
            raise RefusedError(404, "PodNotExists", f"pod {pod_id} does not exist")
        start, end = (_seconds(query.get(key)) for key in ("StartTime", "EndTime"))
        texts = [text for at, text in pod.lines if (start or 0) <= at and (end is None or at < end)]
        return texts[: int(query.get("MaxLines", 2000))]

    def _watch(self, job: StandInJob) -> None:
        """End a job when its pods have ended, or one has failed."""
        while True:
            states = [pod.process.poll() for pod in job.pods]
            if any(state not in (None, 0) for state in states) and job.status == "Running":
                self._kill(job)
                states = [pod.process.wait() for pod in job.pods]
            if None not in states:
                time.sleep(0.1)  # the last lines
                job.ended_at = _utc_stamp()
                final_status = "Succeeded" if not any(states) else "Failed"
                job.become("Stopped" if job.status == "Stopping" else final_status)
                return
            time.sleep(0.05)

    def _kill(self, job: StandInJob) -> None:
        for pod in job.pods:
            if pod.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # it may end meanwhile
                    os.killpg(pod.process.pid, signal.SIGKILL)

    def _mount(self, source: Mapping[str, Any]) -> None:
        """Link a mount's path to the folder of its bucket, as ossfs would show it."""
        match = re.fullmatch(
            r"oss://([^./]+)\.oss-[\w-]+-internal\.aliyuncs\.com/(.*)", source.get("Uri") or ""
        )
        if match is None:
            raise RefusedError(
                400, "InvalidParameter", f"the stand-in mounts OSS alone, not {source}"
            )
        place = Path(source["MountPath"])
        if not place.exists():
            target = self.bucket(match[1]) / match[2]
            target.mkdir(parents=True, exist_ok=True)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(target)


def _seconds(text: str | None) -> float | None:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else None


class _Handler(BaseHTTPRequestHandler):
    cloud: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing: the calls are in `StandIn.asked`."""

    def _serve(self) -> None:
        address = urlsplit(self.path)
        path, query = (
            unquote(address.path),
            {k: v[-1] for k, v in parse_qs(address.query, True).items()},
        )
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.cloud.asked.append((self.command, self.path))
        api = path.startswith("/api/v1/")
        try:
            if self.cloud.busy > 0:
                self.cloud.busy -= 1
                raise RefusedError(503, "ServiceUnavailable", "busy")
            if not self.headers.get("Authorization"):
                raise RefusedError(403, "AccessDenied", "no signature")
            if api:
                self._send(
                    200,
                    json.dumps({"RequestId": "stand-in", **self._dlc(path, query, body)}).encode(),
                )
            else:
                self._oss(path, query, body)
        except RefusedError as why:
            status, code, message = why.args
            text = (
                json.dumps({"Code": code, "Message": message, "RequestId": "stand-in"})
                if api
                else (f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>")
            )
            self._send(status, text.encode())

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _serve  # noqa: N815

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("x-oss-request-id", "stand-in")
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _dlc(self, path: str, query: Mapping[str, str], body: bytes) -> dict[str, Any]:
        cloud = self.cloud
        parts = path.removeprefix("/api/v1/").split("/")
        if parts == ["jobs"] and self.command == "POST":
            return {"JobId": cloud.create(json.loads(body))}
        if parts == ["jobs"]:
            jobs = [job.answer() for job in reversed(cloud.jobs.values())]
            jobs = [job for job in jobs if query.get("DisplayName", "") in job["DisplayName"]]
            size, number = int(query.get("PageSize", 10)), int(query.get("PageNumber", 1))
            return {"Jobs": jobs[(number - 1) * size : number * size], "TotalCount": len(jobs)}
        if parts == ["ecsspecs"]:
            return {
                "EcsSpecs": [{"InstanceType": name} for name in cloud.types],
                "TotalCount": len(cloud.types),
            }
        match parts:
            case ["jobs", id_]:
                return cloud.find(id_).answer()
            case ["jobs", id_, "stop"]:
                cloud.stop(id_)
                return {"JobId": id_}
            case ["jobs", id_, "pods", pod, "logs"]:
                return {"JobId": id_, "PodId": pod, "Logs": cloud.lines(id_, pod, query)}
        raise RefusedError(404, "InvalidAction.NotFound", path)

    def _oss(self, path: str, query: Mapping[str, str], body: bytes) -> None:
        bucket, _, key = path.lstrip("/").partition("/")
        folder = self.cloud.root / "oss" / bucket
        if not folder.is_dir():
            raise RefusedError(404, "NoSuchBucket", f"there is no bucket {bucket}")
        if not key:
            self._send(200, _list_objects(folder, query).encode())
            return
        file = folder / key
        if self.command == "PUT":
            if self.headers.get("x-oss-forbid-overwrite") == "true" and file.exists():
                raise RefusedError(409, "FileAlreadyExists", "the object exists")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(body)
            self._send(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest().upper()}"'})
        elif self.command == "DELETE":
            file.unlink(missing_ok=True)
            self._send(204, b"")
        elif not file.is_file():
            raise RefusedError(404, "NoSuchKey", f"there is no object {key}")
        else:
            content = file.read_bytes()
            headers = {
                "ETag": f'"{hashlib.md5(content).hexdigest().upper()}"',
                "x-oss-object-type": "Normal",
            }
            if self.command == "HEAD":
                import oss2

                crc = oss2.utils.Crc64()
                crc.update(content)
                headers["x-oss-hash-crc64ecma"] = str(crc.crc)
            headers["Last-Modified"] = time.strftime(
                "%a, %d %b %Y %H:%M:%S GMT", time.gmtime(file.stat().st_mtime)
            )
            self._send(200, content, headers)


def _list_objects(folder: Path, query: Mapping[str, str]) -> str:
    """ListObjectsV2's answer: all objects with a prefix, in one page."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    named_files = [(path.relative_to(folder).as_posix(), path) for path in files]
    rows = "".join(
        f"<Contents><Key>{escape(name)}</Key><LastModified>2026-11-26T10:00:00.000Z</LastModified>"
        f'<ETag>"{hashlib.md5(path.read_bytes()).hexdigest().upper()}"</ETag><Type>Normal</Type>'
        f"<Size>{path.stat().st_size}</Size><StorageClass>Standard</StorageClass></Contents>"
        for name, path in named_files
        if name.startswith(query.get("prefix", ""))
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated><KeyCount>1</KeyCount>{rows}</ListBucketResult>"
