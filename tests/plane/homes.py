"""Damage to a home of the control plane: every file, in several ways, one at a time, and the checks
afterwards.

`make` builds a home with one job of each kind, `mutations` lists the damages of its files, `check`
damages a copy, starts a control plane on it, and returns the faults.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sqlite3
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from smtrain.core.facts.sagemaker import FINAL_STATUSES, LOG_GROUP
from smtrain.plane.client import BUCKET, REGION
from testing.plane import Plane
from tests.plane.planes import Forks, NoStartError, Server, causes, request_of
from tests.processes import wait_for

WAYS = ("half", "empty", "random", "folder", "types", "removed", "foreign")
NESTED = "[" * 100_000 + "]" * 100_000
RUNS = "runs"
"""The job that runs when the plane is killed."""
LOOSE = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm")
"""Files whose damage may lose any objects."""


@dataclass
class Known:
    """The content of a home before the damage."""

    folder: Path
    """A copy of the files; `home` is damaged."""
    home: Path
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> status and final metrics."""
    logs: dict[str, list[str]] = field(default_factory=dict)
    """Stream -> lines."""
    objects: dict[tuple[str, str], bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    keys: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Blob -> (bucket, key)."""


@dataclass(frozen=True)
class Mutation:
    """A file below the home, a way of damage, and the variant of `types`."""

    path: str
    way: str
    variant: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.way}" + (f":{self.variant}" if self.way == "types" else "")


@dataclass
class Calls:
    """Clients of a running plane."""

    sagemaker: Any
    s3: Any
    logs: Any

    @staticmethod
    def of(server: Server) -> Calls:
        """Clients, cached by address and keys, as they take a second to make."""
        address = repr(server.endpoint)  # without the keys
        address += repr((server.endpoint.access_key, server.endpoint.secret_key))
        if address not in _made:
            _made[address] = Calls(*server.clients("sagemaker", "s3", "logs"))
        return _made[address]

    def create(self, name: str, command: str, **more: Any) -> None:
        output = {"S3OutputPath": f"s3://{BUCKET}/out", "CompressionType": "NONE"}
        request = request_of(name, ["sh", "-c", command], **{"OutputDataConfig": output, **more})
        self.sagemaker.create_training_job(**request)

    def wait(
        self, name: str, until: Callable[[dict[str, Any]], Any], seconds: float = 90.0
    ) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while True:
            job: dict[str, Any] = self.sagemaker.describe_training_job(TrainingJobName=name)
            if until(job):
                return job
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{name} is {job['TrainingJobStatus']}, {job['SecondaryStatus']}"
                )
            time.sleep(0.05)

    def jobs(self) -> dict[str, str]:
        pages = self.sagemaker.get_paginator("list_training_jobs").paginate(
            PaginationConfig={"PageSize": 100}
        )
        return {
            s["TrainingJobName"]: s["TrainingJobStatus"]
            for p in pages
            for s in p["TrainingJobSummaries"]
        }

    def streams(self) -> list[str]:
        pages = self.logs.get_paginator("describe_log_streams").paginate(logGroupName=LOG_GROUP)
        return [stream["logStreamName"] for page in pages for stream in page["logStreams"]]

    def all_lines(self) -> dict[str, list[str]]:
        """The lines of all streams, in a few calls."""
        by_stream: dict[str, list[str]] = {}
        for page in self.logs.get_paginator("filter_log_events").paginate(logGroupName=LOG_GROUP):
            for event in page["events"]:
                by_stream.setdefault(event["logStreamName"], []).append(event["message"])
        return by_stream

    def lines(self, stream: str) -> list[str]:
        answer = self.logs.get_log_events(
            logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True
        )
        return [event["message"] for event in answer["events"]]


_made: dict[str, Calls] = {}


def _ended(job: dict[str, Any]) -> bool:
    return job["TrainingJobStatus"] in FINAL_STATUSES


def _training(job: dict[str, Any]) -> bool:
    return job["SecondaryStatus"] == "Training"


SCRIPTS = {
    "completed": (
        "echo one; echo two; echo model > /opt/ml/model/m; echo data > /opt/ml/output/data/d"
    ),
    "failed": "echo about to fail; echo why > /opt/ml/output/failure; exit 3",
    "metrics": "for i in 1 2 3; do echo loss=$i.5; done",
    "several": "echo $HOSTNAME",
    "pool": "echo warm; echo g > $SAGEMAKER_MANAGED_WARMPOOL_CACHE_DIRECTORY/graph",
    "checkpoints": "mkdir -p /opt/ml/checkpoints/1; echo c > /opt/ml/checkpoints/1/c; echo saved",
    "tagged": "echo tagged; cat /opt/ml/input/data/text/a.txt",
    "stopped": "echo up; sleep 60",
    "limit": "echo long; sleep 60",
    "spot": (
        "echo attempt; [ -e /opt/ml/checkpoints/n ] && exit 0; echo 1 > /opt/ml/checkpoints/n;"
        " sleep 60"
    ),
    RUNS: "echo runs; echo k > /opt/ml/checkpoints/k; sleep 60",
}


def _more(name: str) -> dict[str, Any]:
    """The further parts of a kind's request."""
    checkpoints = {"CheckpointConfig": {"S3Uri": f"s3://{BUCKET}/checkpoints/{name}"}}
    source = {"S3DataType": "S3Prefix", "S3Uri": f"s3://{BUCKET}/text"}
    more: dict[str, dict[str, Any]] = {
        "metrics": {"algorithm": {"MetricDefinitions": [{"Name": "loss", "Regex": r"loss=(\S+)"}]}},
        "several": {"resources": {"InstanceCount": 2}},
        "pool": {"resources": {"KeepAlivePeriodInSeconds": 3600}},
        "checkpoints": checkpoints,
        "tagged": {
            "Tags": [{"Key": "team", "Value": "a"}],
            "HyperParameters": {"x": "1"},
            "Environment": {"NAME": "value"},
            "InputDataConfig": [{"ChannelName": "text", "DataSource": {"S3DataSource": source}}],
        },
        "limit": {"StoppingCondition": {"MaxRuntimeInSeconds": 1}},
        "spot": {
            "EnableManagedSpotTraining": True,
            "StoppingCondition": {"MaxRuntimeInSeconds": 300, "MaxWaitTimeInSeconds": 300},
            **checkpoints,
        },
        RUNS: checkpoints,
    }
    return more.get(name, {})


def make(folder: Path, forks: Forks) -> Known:
    """Build the home, kill its control plane while a job runs, and copy the files to
    `folder`/base.
    """
    known = Known(folder / "base", folder / "home")
    server = Server(known.home, forks=forks)
    server.start()
    try:
        _fill(server, known)
    finally:
        server.kill()
    shutil.copytree(known.home, known.folder, symlinks=True)
    for path in (known.folder / "local/s3/blobs").rglob("*"):
        if path.is_file():
            known.blobs[path.name] = path.read_bytes()
    database = sqlite3.connect(known.home / "local/s3/index.sqlite")
    for bucket, key, record in database.execute("SELECT bucket, key, record FROM objects"):
        if blob := json.loads(record).get("blob"):
            known.keys[blob] = (bucket, key)
    database.close()
    return known


def _fill(server: Server, known: Known) -> None:
    calls, plane = Calls.of(server), Plane(server.endpoint)
    calls.s3.put_object(Bucket=BUCKET, Key="text/a.txt", Body=b"text of a channel\n")
    calls.s3.create_bucket(Bucket="second")
    calls.s3.put_bucket_versioning(Bucket="second", VersioningConfiguration={"Status": "Enabled"})
    for body in (b"old", b"new"):
        calls.s3.put_object(
            Bucket="second", Key="versions/\u00fc", Body=body, Metadata={"a": "b"}, Tagging="t=1"
        )
    calls.s3.put_object(Bucket="second", Key="gone", Body=b"gone")
    calls.s3.delete_object(Bucket="second", Key="gone")
    plane.spot(after=[0.7], away=0.1)
    plane.hosts(run_in="sandbox")
    for name, script in SCRIPTS.items():
        calls.create(name, script, **_more(name))
    calls.wait("stopped", _training)
    calls.sagemaker.stop_training_job(TrainingJobName="stopped")
    for name in SCRIPTS:
        job = calls.wait(name, _training if name == RUNS else _ended)
        known.jobs[name] = {
            "status": "Failed" if name == RUNS else job["TrainingJobStatus"],
            "metrics": {m["MetricName"]: m["Value"] for m in job.get("FinalMetricDataList", [])},
        }
    statuses = {name: record["status"] for name, record in known.jobs.items()}
    wanted = {"failed": "Failed", RUNS: "Failed", "stopped": "Stopped", "limit": "Stopped"}
    assert statuses == {name: wanted.get(name, "Completed") for name in SCRIPTS}, statuses
    (server.home / "models").mkdir(exist_ok=True)
    (server.home / "models/kept").write_text("a file of another command\n")
    streams = calls.streams()
    wait_for(
        lambda: calls.lines(next(stream for stream in streams if stream.startswith(f"{RUNS}/"))), 20
    )
    known.logs = {stream: calls.lines(stream) for stream in streams}
    assert len(known.logs) >= len(SCRIPTS) + 1
    for bucket in (BUCKET, "second"):
        for item in calls.s3.list_objects_v2(Bucket=bucket).get("Contents", []):
            # Uploads of the kill may be lost.
            if not item["Key"].startswith(f"checkpoints/{RUNS}"):
                body = calls.s3.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
                known.objects[bucket, item["Key"]] = body
    time.sleep(0.2)


def files(known: Known, *, everything: bool) -> list[str]:
    """Files below the home; without `everything`, only three of the blobs and three of the running
    host.
    """
    paths = sorted(str(p.relative_to(known.folder)) for p in known.folder.rglob("*") if p.is_file())
    if everything:
        return paths
    chance = random.Random(0)
    kept = []
    for group in ("local/s3/blobs/", f"local/jobs/{RUNS}/hosts/"):
        members = [path for path in paths if path.startswith(group)]
        kept += chance.sample(members, min(3, len(members)))
        paths = [path for path in paths if path not in members]
    return sorted(paths + kept)


def mutations(known: Known, *, everything: bool = False, many: bool = False) -> list[Mutation]:
    """Every file in every way; with `many`, all variants of wrong types, not one for each file."""
    all_mutations = []
    for number, path in enumerate(files(known, everything=everything)):
        for way in WAYS:
            total = len(_variants(known.folder / path)) if way == "types" else 1
            chosen = (
                range(total) if many else [random.Random(number).randrange(total)] if total else []
            )
            all_mutations += [Mutation(path, way, variant) for variant in chosen]
    return all_mutations


LEAVES: tuple[Any, ...] = (
    5,
    -1,
    1e300,
    "1e999",
    None,
    [],
    {},
    True,
    "\ud800",
    "",
    "text",
    [None],
    {"a": None},
    "NESTED",
    "NAN",
    "9" * 5000,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items: Any = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, member in items:
        yield from _places(member, (*path, key))


def _put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _put(copy[path[0]], path[1:], new)
    return copy


def _written(value: Any) -> str:
    return json.dumps(value).replace('"NESTED"', NESTED).replace('"NAN"', "NaN")


ROWS = (
    (1, "key = CAST(X'ff' AS TEXT)"),
    (1, "key = 5"),
    (2, "key = NULL"),
    (1, "bucket = 7"),
    (1, "bucket = 'nowhere'"),
    (3, "record = 'NESTED'"),
    (2, 'record = \'{"marker": 5, "modified": "2026-01-01T00:00:00"}\''),
)
"""Changes of the object in this row."""
FIELDS = (
    ("modified", "5"),
    ("modified", "'9999-12-31T23:59:59+14:00'"),
    ("blob", "'../../../../etc/passwd'"),
    ("blob", "5"),
    ("blob", "''"),
    ("metadata", "5"),
    ("metadata.a", "5"),
    ("tags", "5"),
    ("tags", "json('[1]')"),
    ("attributes", "5"),
    ("attributes.contentsize", "'x'"),
    ("attributes._etag", "5"),
    ("attributes._storage_class", "5"),
    ("attributes.checksum_value", "5"),
    ("attributes.value", "'x'"),
)
"""Members of the second object's record, and SQL for their new values."""
BUCKETS = (
    "record = 'NESTED'",
    "record = CAST(X'ff' AS TEXT)",
    "name = CAST(X'ff' AS TEXT)",
    "name = 5",
    "name = 'x'",
    "name = '../up'",
    "name = NULL",
    "record = json_set(record, '$.region', 'mars')",
    "record = json_set(record, '$.region', NULL)",
    "record = json_set(record, '$.created', 5)",
    "record = json_set(record, '$.created', '0001-01-01T00:00:00+14:00')",
    "record = json_set(record, '$.versioning', 5)",
)
SQL = (
    *(f"UPDATE objects SET {change} WHERE rowid = {row}" for row, change in ROWS),
    *(
        f"UPDATE objects SET record = json_set(record, '$.{name}', {new}) WHERE rowid = 2"
        for name, new in FIELDS
    ),
    *(f"UPDATE buckets SET {change} WHERE name = 'second'" for change in BUCKETS),
    "UPDATE objects SET record = 5",
    "UPDATE objects SET record = X'ff00'",
    "UPDATE objects SET record = CAST(X'ff' AS TEXT)",
    "UPDATE objects SET record = '[]'",
    "UPDATE objects SET record = 'null'",
    "UPDATE objects SET ordinal = 'x'",
    "UPDATE objects SET record = json_set(record, '$.attributes._version_id', 5)",
    "UPDATE buckets SET record = 5",
    "UPDATE buckets SET record = json_set(record, '$.region', 5)",
    "INSERT INTO buckets SELECT 'third' || rowid, record FROM objects",
    "DELETE FROM buckets WHERE name = 'second'",
    "DROP TABLE objects",
    "DROP TABLE buckets; CREATE TABLE buckets (a, b, c)",
    "ALTER TABLE objects RENAME COLUMN record TO r",
    "DROP TABLE objects; CREATE VIEW objects AS SELECT 1 AS bucket",
    "INSERT INTO objects SELECT bucket, key, ordinal + 1, record FROM objects",
    "PRAGMA journal_mode = DELETE",
    "CREATE TRIGGER t BEFORE INSERT ON objects BEGIN SELECT RAISE(FAIL, 'no'); END",
)
LINES = (
    "5",
    '["a", "b"]',
    '[1e300, "x"]',
    '[-1, "x"]',
    '[1, "\\ud800"]',
    '[1764000000000, "lone \\ud800 surrogate"]',
    "NESTED",
    '[NaN, "x"]',
    '[true, "x"]',
    "[1764000000000, null]",
    "null",
    "{}",
    "[" + "9" * 5000 + ', "x"]',
    '[8796093022207, "far"]',
    '[1764000000000, "\\u0000"]',
    '[1764000000000, "loss=nan"]',
    '[1764000000000, "loss=' + "9" * 400 + '"]',
    '[1764000000000, "' + "x" * (2 << 20) + '"]',
    '[1764000000000, "\\ud83d\\ude00 pair"]',
    "[1764000000000]",
    '[1764000000000, "a", "b"]',
)


def _variants(path: Path) -> list[Callable[[Path], None]]:
    """Ways to write a well-formed file of wrong types."""
    if path.name == "index.sqlite":

        def run(sql: str) -> Callable[[Path], None]:
            def change(target: Path) -> None:
                database = sqlite3.connect(target)
                with contextlib.suppress(sqlite3.IntegrityError):  # two rows of a key became one
                    database.executescript(sql.replace("NESTED", NESTED))
                database.close()

            return change

        return [run(sql) for sql in SQL]
    if path.suffix == ".jsonl":
        return [
            lambda target, line=line: _insert(target, line.replace("NESTED", NESTED))  # type: ignore[misc]
            for line in LINES
        ]
    try:
        value = json.loads(path.read_text())
    except (ValueError, OSError):
        texts = (
            "5",
            "null",
            NESTED,
            '"\\ud800"',
            "{}",
            "[profile smtrain]\nendpoint_url = 5\n",
            "9" * 5000,
        )
        return [lambda target, text=text: _replace(target, text.encode()) for text in texts]  # type: ignore[misc]
    places = list(_places(value))
    ways: list[Callable[[Path], None]] = []
    for place in places:
        for leaf in LEAVES:
            text = _written(_put(value, place, leaf))
            ways.append(lambda target, text=text: _replace(target, text.encode()))  # type: ignore[misc]
        if place:
            ways.append(
                lambda target, place=place: _replace(target, _without(value, place).encode())  # type: ignore[misc]
            )
    return ways


def _without(value: Any, path: tuple[Any, ...]) -> str:
    copy = json.loads(json.dumps(value))
    inner = copy
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    return json.dumps(copy)


def _replace(path: Path, body: bytes) -> None:
    mode = path.stat().st_mode
    path.write_bytes(body)
    path.chmod(stat.S_IMODE(mode))


def _insert(path: Path, line: str) -> None:
    """Insert a line in the middle of a log."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(len(lines) // 2, line.encode() + b"\n")
    _replace(path, b"".join(lines))


def apply(known: Known, mutation: Mutation) -> None:
    """Make a damaged copy of the home."""
    shutil.rmtree(known.home, ignore_errors=True)
    subprocess.run(["cp", "-a", known.folder, known.home], check=True)
    path = known.home / mutation.path
    size = path.stat().st_size
    if mutation.way == "half":
        os.truncate(path, size // 2)
    elif mutation.way == "empty":
        os.truncate(path, 0)
    elif mutation.way == "random":
        _replace(path, random.Random(str(mutation)).randbytes(max(size, 100)))
    elif mutation.way == "folder":
        path.unlink()
        path.mkdir()
        (path / "inside").write_text("x")
    elif mutation.way == "types":
        _variants(path)[mutation.variant](path)
    elif mutation.way == "removed":
        path.unlink()
    elif mutation.way == "foreign":
        # Files of other programs, next to the file and in its parent: a file, a dangling link, a
        # fifo, a folder.
        for folder in {path.parent, path.parent.parent} - {known.home.parent}:
            (folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
            (folder / "nowhere").symlink_to("does-not-exist")
            (folder / os.fsdecode(b"caf\xe9")).write_bytes(b"x")
            with contextlib.suppress(FileExistsError):
                (folder / "job.json.bak").mkdir()
            os.mkfifo(folder / f"fifo{path.suffix}")
            (folder / f"unreadable{path.suffix}").write_bytes(b"x")
            (folder / f"unreadable{path.suffix}").chmod(0)


def check(known: Known, mutation: Mutation, forks: Forks | None, *, starts: int = 2) -> list[str]:
    """Damage a copy, start a control plane on it, twice, and return the faults with their causes in
    the log.
    """
    apply(known, mutation)
    server = Server(known.home, forks=forks)
    faults: list[str] = []
    try:
        for turn in ("", "second start: ")[:starts]:
            try:
                server.start(20.0)
            except NoStartError as error:
                return [*faults, f"{turn}the plane does not start: {_cause(str(error))}"]
            earlier = len(faults)
            try:
                _look(known, mutation, server, faults, again=bool(turn))
            except Exception as error:  # of a client that got the content of the damaged file, too
                faults.append(f"{type(error).__name__}: {error}"[:400])
            if turn:
                faults[earlier:] = [turn + text for text in faults[earlier:]]
            if reasons := [cause for cause in causes(server.logged()) if len(faults) > earlier]:
                faults[-1] += f" [{'; '.join(reasons)[:600]}]"
            server.kill()
            if faults:
                break
    finally:
        server.kill()
    return faults


def _cause(log: str) -> str:
    reasons = causes(log)
    return next(reversed(reasons)) if reasons else " ".join(log.split())[:300]


def _look(
    known: Known, mutation: Mutation, server: Server, faults: list[str], *, again: bool
) -> None:
    calls, log = Calls.of(server), server.log.read_text(errors="replace")
    parts = mutation.path.split("/")
    theirs = parts[2] if parts[:2] == ["local", "jobs"] else ""
    file = parts[-1]

    def named(*words: str) -> bool:
        return any(
            word and "warning: " in line and word in line
            for line in log.splitlines()
            for word in words
        )

    harmless = mutation.way == "foreign" or mutation.path.startswith(f"local/jobs/{RUNS}/hosts/")
    jobs = calls.jobs()
    for name, record in known.jobs.items():
        own = name == theirs and not harmless
        if name not in jobs:
            if not own:
                faults.append(f"job {name} is not listed")
            elif file == "job.json" and mutation.way != "removed" and not named(f"jobs/{name}"):
                faults.append(f"job {name} is gone and the log does not name it")
            continue
        job = calls.sagemaker.describe_training_job(TrainingJobName=name)
        if own and file == "job.json":
            continue
        if job["TrainingJobStatus"] != record["status"]:
            faults.append(f"job {name} was {record['status']} and is {job['TrainingJobStatus']}")
        metrics = {m["MetricName"]: m["Value"] for m in job.get("FinalMetricDataList", [])}
        if not own and metrics != record["metrics"]:
            faults.append(f"job {name} had metrics {record['metrics']} and has {metrics}")
    if again:
        _look_at_new_job(calls, faults)
        return
    streams, lines_before = set(calls.streams()), calls.all_lines()
    for stream, lines in known.logs.items():
        if stream not in streams:
            if not (stream.split("/")[0] == theirs and not harmless):
                faults.append(f"log {stream} is gone")
            elif (
                file.endswith(".jsonl") and mutation.way in ("random", "folder") and not named(file)
            ):
                faults.append(f"log {stream} is gone and server.log does not name it")
            continue
        theirs_too = stream.split("/")[0] == theirs
        expected = calls.lines(stream) if theirs_too else lines_before.get(stream, [])
        if theirs_too and not harmless and file in ("job.json", f"{stream.split('/')[1]}.jsonl"):
            if mutation.way == "types" and file != "job.json" and not set(lines) <= set(expected):
                faults.append(f"log {stream} lost lines next to the damaged one: {expected}")
            continue
        if expected != lines:
            faults.append(f"log {stream} had {lines} and has {expected}")
    _look_at_objects(known, mutation, server, calls, named, faults)
    spoilt = file in ("endpoint.json", "hosts.json") and mutation.way in (
        "random",
        "folder",
        "half",
    )
    if spoilt and not named(file):
        faults.append(f"server.log does not name {file}")
    _look_at_new_job(calls, faults)
    _look_from_outside(server, faults)


def _look_at_new_job(calls: Calls, faults: list[str]) -> None:
    name = f"new-{time.time_ns()}"
    calls.create(name, "echo new; echo m > /opt/ml/model/m")
    if (job := calls.wait(name, _ended, 40.0))["TrainingJobStatus"] != "Completed":
        faults.append(f"a new job is {job['TrainingJobStatus']}: {job.get('FailureReason')}")


def _look_at_objects(
    known: Known,
    mutation: Mutation,
    server: Server,
    calls: Calls,
    named: Callable[..., bool],
    faults: list[str],
) -> None:
    file = mutation.path.rsplit("/", 1)[-1]
    loose = file in LOOSE and mutation.way != "foreign"
    buckets = {bucket["Name"] for bucket in calls.s3.list_buckets()["Buckets"]}
    if BUCKET not in buckets or ("second" not in buckets and not loose):
        faults.append(f"buckets {sorted(buckets)}")
    hurt = known.keys.get(file) if mutation.way != "foreign" else None
    for bucket in sorted(buckets & {BUCKET, "second"}):
        calls.s3.list_objects_v2(Bucket=bucket)
        calls.s3.list_object_versions(Bucket=bucket)
    for (bucket, key), body in known.objects.items():
        if (bucket, key) == hurt:
            _look_at_hurt(calls, bucket, key, mutation, named, faults)
            continue
        try:
            got = calls.s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] >= 500:
                raise
            if not loose:
                faults.append(f"s3://{bucket}/{key}: {error}")
            continue
        if got != body and not loose:
            faults.append(f"s3://{bucket}/{key} has other bytes")
    if file == "index.sqlite" and mutation.way != "foreign":
        held = {path.name for path in server.state.glob("s3*/blobs*/*/*")}
        # The running job's objects may have no record; the bodies of records must stay.
        if lost := set(known.keys) - held:
            faults.append(f"{len(lost)} of {len(known.keys)} bodies are deleted from the disk")
        return
    lost = {blob for blob in known.keys if blob != file} - {
        path.name for path in server.state.glob("s3*/blobs*/*/*")
    }
    if lost and not loose:
        faults.append(f"{len(lost)} bodies are deleted from the disk")


def _look_at_hurt(
    calls: Calls,
    bucket: str,
    key: str,
    mutation: Mutation,
    named: Callable[..., bool],
    faults: list[str],
) -> None:
    """Check an object with a damaged body: it is missing, or an error for the client, and the log
    names it.
    """
    there = True
    try:
        calls.s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    except BotoCoreError:
        there = False  # the client has seen it: too few bytes, or another checksum
    except ClientError as error:
        there = False
        if error.response["ResponseMetadata"]["HTTPStatusCode"] >= 500:
            faults.append(f"GetObject of the damaged s3://{bucket}/{key}: {error!r}")
    if there and mutation.way in ("half", "empty"):
        faults.append(f"s3://{bucket}/{key}, whose body is cut short, is served as whole")
    if not there and mutation.way in ("folder", "removed") and not named(key, mutation.path):
        faults.append(f"s3://{bucket}/{key} is gone and server.log does not name it")


def _look_from_outside(server: Server, faults: list[str]) -> None:
    """`smtrain local status` and `clean` without `--yes`, in this process."""
    from smtrain.plane.client import running_endpoint
    from smtrain.plane.server.clean import plan, set_aside_files, usage

    try:
        usage(server.home).line()
        set_aside_files(server.home)
        endpoint = running_endpoint(server.home)
        assert endpoint
        assert endpoint.region == REGION
        plan(endpoint, everything=True)
    except Exception as error:
        frames = causes("".join(_formatted(error)))
        faults.append(f"status or clean: {next(iter(frames), repr(error))}"[:400])


def _formatted(error: BaseException) -> list[str]:
    import traceback

    return traceback.format_exception(error)
