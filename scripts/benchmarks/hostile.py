"""Run random jobs that do odd but legal things in their sandboxes, and check that the local control
plane survives.

    scripts/bench hostile [--jobs 500] [--seed 0] [--json]
    scripts/bench hostile --seed 17 --jobs 1           # one job again
    scripts/bench hostile --show --seed 17 --jobs 1    # its steps
    scripts/bench hostile --without backtracking,bomb  # leave out families of steps

Each seed is a job of `tests/plane/hostile_job.py`: odd file names, links, fifos, sparse files, deep
trees, floods, metric lines, daemons, a stop or a limit. Several run at once, next to a well-behaved
neighbour. Then:

  end         the job has ended in time, with a status and a reason that match its plan
  files       its good checkpoint, model and output are in S3 byte for byte, and no file from outside /opt/ml
  log         its log has every mark in order; its last good metric is known
  neighbour   it Completed with its whole log, metrics, model and checkpoint
  plane       DescribeTrainingJob answered within a second (times the load of a machine busy with
  other work) restart     after each 25 jobs the plane is killed and has all jobs when it is back;
  every second time while jobs run clean       `smtrain local clean --all` leaves no job, object,
  folder or process

Prints each fault with its seed; a plane that hangs or does not start is replaced by a new one, and
the jobs that ran then are run again one by one. The status is 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from smtrain.core.facts.sagemaker import FINAL_STATUSES, LOG_GROUP  # noqa: E402
from smtrain.plane.client import BUCKET  # noqa: E402
from tests.plane import hostile_job as hostile  # noqa: E402
from tests.plane.hostile_job import Plan, plan_of  # noqa: E402
from tests.plane.planes import (  # noqa: E402
    NoStartError,
    Server,
    causes,
    request_of,
    scratch,
    traces,
)

BLOCK = 25
RESTART_REASON = "the local control plane was restarted"
PATIENCE = 60.0  # seconds that a job may take; more on a busy machine
SPACE = ("disk", "space", "No space", "full")
PASSWD_DIGEST = hashlib.sha256(Path("/etc/passwd").read_bytes()).hexdigest()


def busy() -> float:
    """The slowdown of this machine compared with an idle one."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@dataclass
class Fault:
    """A broken guarantee."""

    seed: int
    kind: str
    text: str
    plan: str = ""


@dataclass
class Totals:
    """Totals over all homes."""

    jobs: int = 0
    neighbours: int = 0
    restarts: int = 0
    faults: list[Fault] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    causes: dict[str, str] = field(default_factory=dict)
    memory_mib: list[float] = field(default_factory=list)


class LostError(Exception):
    """The plane hangs or is gone."""


class Home:
    """One home: a plane, its jobs, and their expected results."""

    def __init__(self, folder: Path, options: argparse.Namespace, totals: Totals) -> None:
        self.options, self.totals = options, totals
        self.server = Server(
            folder / "home", *(["--no-namespaces"] if options.no_namespaces else [])
        )
        self.lock = threading.Lock()
        self.lost = threading.Event()
        self.unstartable = False
        self.tainted = False
        """True after a fault whose leftovers would repeat it in further checks of this home."""
        self.kills: list[tuple[float, float]] = []
        """(from, to): times without the plane."""
        self.running: dict[str, Plan | None] = {}
        self.filled: set[str] = set()
        self.ended: dict[str, str] = {}
        self._connect(self.server.start())
        code = (ROOT / "tests/plane/hostile_job.py").read_bytes()
        self.s3.put_object(Bucket=BUCKET, Key="code/hostile_job.py", Body=code)

    def _connect(self, _: Any) -> None:
        self.sagemaker, self.s3, self.logs, self.cloudwatch = self.server.clients(
            "sagemaker", "s3", "logs", "cloudwatch"
        )

    def fault(self, seed: int, kind: str, text: str, plan: Plan | None = None) -> None:
        with self.lock:
            self.totals.faults.append(Fault(seed, kind, text, plan.text() if plan else ""))
        print(f"seed {seed}: {kind}: {text[:600]}", file=sys.stderr, flush=True)
        if plan:
            print(f"    {plan.text()[:600]}", file=sys.stderr, flush=True)

    # Calls

    def call(self, request: Callable[[], Any]) -> Any:
        """Make a call; retry it if the plane was killed and is back. Raises `LostError`."""
        from botocore.exceptions import BotoCoreError, ClientError

        deadline = time.monotonic() + 30 * busy()
        while True:
            try:
                return request()
            except ClientError as error:
                if (
                    error.response["ResponseMetadata"]["HTTPStatusCode"] < 500
                    or time.monotonic() > deadline
                ):
                    raise
            except BotoCoreError as error:
                if self.lost.is_set() or time.monotonic() > deadline:
                    raise LostError(repr(error)) from None
            time.sleep(0.2)

    def describe(self, name: str) -> dict[str, Any]:
        description: dict[str, Any] = self.call(
            lambda: self.sagemaker.describe_training_job(TrainingJobName=name)
        )
        return description

    def create(
        self, name: str, arguments: list[str], metrics: list[tuple[str, str]], plan: Plan | None
    ) -> None:
        source = {
            "S3DataType": "S3Prefix",
            "S3Uri": f"s3://{BUCKET}/code",
            "S3DataDistributionType": "FullyReplicated",
        }
        request = request_of(
            name,
            ["python3", "-I", "-S", "../input/data/code/hostile_job.py", *arguments],
            algorithm={
                "MetricDefinitions": [{"Name": metric, "Regex": regex} for metric, regex in metrics]
            },
            resources={
                "InstanceCount": plan.hosts if plan else 1,
                **({"KeepAlivePeriodInSeconds": 1} if plan and plan.warm else {}),
            },
            InputDataConfig=[{"ChannelName": "code", "DataSource": {"S3DataSource": source}}],
            OutputDataConfig={
                "S3OutputPath": f"s3://{BUCKET}/out",
                "CompressionType": "GZIP" if plan and plan.archive else "NONE",
            },
            CheckpointConfig={"S3Uri": f"s3://{BUCKET}/checkpoints/{name}"},
            StoppingCondition={"MaxRuntimeInSeconds": plan.limit if plan else 120},
        )
        with self.lock:
            self.running[name] = plan
            if plan and "huge" in plan.families:
                self.filled.update(self.running)
        self.call(lambda: self.sagemaker.create_training_job(**request))

    def wait(self, name: str, seconds: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            job = self.describe(name)
            if job["TrainingJobStatus"] in FINAL_STATUSES:
                return job
            time.sleep(0.15)
        return None

    def lines(self, name: str) -> list[str]:
        """The whole log of the first host."""
        streams = self.call(
            lambda: self.logs.describe_log_streams(
                logGroupName=LOG_GROUP, logStreamNamePrefix=f"{name}/algo-1-"
            )
        )["logStreams"]
        messages: list[str] = []
        for stream in streams:
            token: dict[str, str] = {}
            while True:
                query = {
                    "logGroupName": LOG_GROUP,
                    "logStreamName": stream["logStreamName"],
                    **token,
                }
                page = self.call(partial(self.logs.get_log_events, startFromHead=True, **query))
                messages += [event["message"] for event in page["events"]]
                if token.get("nextToken") == page["nextForwardToken"]:
                    break
                token = {"nextToken": page["nextForwardToken"]}
        return messages

    def objects(self, prefix: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        page_token: dict[str, str] = {}
        while True:
            page = self.call(
                partial(self.s3.list_objects_v2, Bucket=BUCKET, Prefix=prefix, **page_token)
            )
            sizes.update({item["Key"]: item["Size"] for item in page.get("Contents", [])})
            if not (token := page.get("NextContinuationToken")):
                return sizes
            page_token = {"ContinuationToken": token}

    def body(self, key: str) -> bytes:
        return bytes(self.call(lambda: self.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()))

    def killed_during(self, began: float) -> bool:
        return any(end >= began for _, end in self.kills)

    # Jobs

    def run(self, seed: int) -> None:
        """One hostile job from its creation to the checks."""
        plan = plan_of(seed, self.options.only)
        plan.steps = [step for step in plan.steps if step[0] not in self.options.without]
        name, began = f"hostile-{seed}-{time.time_ns() % 10**6}", time.time()
        arguments = [str(seed), name, *(sorted(plan.families) or ["none"])]
        try:
            self.create(name, arguments, plan.metrics, plan)
            if plan.stop is not None:
                time.sleep(plan.stop)
                with contextlib.suppress(self.sagemaker.exceptions.ClientError):
                    self.call(lambda: self.sagemaker.stop_training_job(TrainingJobName=name))
            patience = (PATIENCE + (240 if "huge" in plan.families else 0)) * min(busy(), 2)
            job = self.wait(name, patience)
            if job is None:
                self.tainted = True
                description = self.describe(name)
                self.fault(
                    seed,
                    "never ends",
                    f"{description['SecondaryStatus']} after {patience:.0f} s",
                    plan,
                )
                with contextlib.suppress(self.sagemaker.exceptions.ClientError):
                    self.call(lambda: self.sagemaker.stop_training_job(TrainingJobName=name))
                if self.wait(name, 20 * min(busy(), 2)) is None:
                    self.fault(
                        seed, "Stop has no effect", self.describe(name)["SecondaryStatus"], plan
                    )
                return
            self.judge(seed, name, plan, job, began)
        finally:
            with self.lock:
                self.running.pop(name, None)
                self.totals.jobs += 1

    def judge(self, seed: int, name: str, plan: Plan, job: dict[str, Any], began: float) -> None:
        """Compare a job that has ended with its plan."""
        status, reason = job["TrainingJobStatus"], job.get("FailureReason", "")
        with self.lock:
            self.totals.ends[status] += 1
            self.ended[name] = status

        def fault(kind: str, text: str) -> None:
            self.fault(seed, kind, text, plan)

        was_restarted = RESTART_REASON in reason and self.killed_during(began)
        if not was_restarted and (difference := _end_fault(plan, job)):
            fault("end", f"{difference}: {status}, {job['SecondaryStatus']}, {reason!r}")
        if "root:x:" in reason:
            fault("leak", f"FailureReason has a file from outside: {reason[:100]!r}")
        lines = self.lines(name)
        our_marks = [line for line in lines if line in set(hostile.marks_of(plan))]
        marks = hostile.marks_of(plan)
        # A stop, a limit or a kill may come before the end; the lines until then are still in
        # order.
        cut = was_restarted or plan.end[0] == "sleep"
        if our_marks != marks[: len(our_marks)] or (len(our_marks) < len(marks) and not cut):
            fault(
                "log",
                f"{len(our_marks)} of {len(marks)} marks, after {len(lines)} lines; the last:"
                f" {lines[-1:]!r:.200}",
            )
        wrote = marks[0] in lines
        final = {
            point["MetricName"]: point["Value"] for point in job.get("FinalMetricDataList", [])
        }
        good = [mark for mark in our_marks if "good=" in mark]
        if good and not was_restarted and "backtracking" not in plan.families:
            last_good = float(good[-1].rpartition("=")[2])
            if final.get("good") != last_good:
                fault("metric", f"the last good value is {last_good}, described is {final}")
        if wrote and not was_restarted:
            self._files(name, plan, lines, fault)
        self._leftovers(name, fault)

    def _files(
        self, name: str, plan: Plan, lines: list[str], fault: Callable[[str, str], None]
    ) -> None:
        """Check files: good ones byte for byte, no other that S3 can hold missing, none from
        outside.
        """
        full = name in self.filled or "huge" in plan.families
        bases = {"checkpoints": f"checkpoints/{name}/", "model": f"out/{name}/output/model/"}
        bases["output/data"] = f"out/{name}/output/data/"
        objects = {**self.objects(f"checkpoints/{name}/"), **self.objects(f"out/{name}/")}
        moved_folders = {args["folder"] for family, args in plan.steps if family == "replaced"}
        moved_folders |= {"output/data"} if "output" in moved_folders else set()
        archives = {"model": "model.tar.gz", "output/data": "output.tar.gz"} if plan.archive else {}
        contents: dict[str, dict[str, bytes]] = {}
        for folder, archive in archives.items():
            key = f"out/{name}/output/{archive}"
            if key in objects:
                contents[folder] = _unpack_archive(self.body(key))
        expected_files = hostile.good_files(plan.seed)
        for family, args in plan.steps:
            if family in ("names", "odd") and args["folder"] in hostile.UPLOADED:
                for i in args["which"]:
                    path = f"{args['folder']}/names/{hostile.FINE[i]}"
                    expected_files[path] = hostile.content(0, hostile.FINE[i], 50)
        for path, body in expected_files.items():
            folder = next(folder for folder in hostile.UPLOADED if path.startswith(folder + "/"))
            if folder in moved_folders or (full and folder != "checkpoints"):
                continue
            inner_path = path.removeprefix(folder + "/")
            key = bases[folder] + inner_path
            plain = None if folder in archives or key not in objects else self.body(key)
            got = contents.get(folder, {}).get(inner_path, plain)
            if got != body:
                difference = "is not in S3" if got is None else f"has {len(got)} bytes that differ"
                notes = [line for line in lines if line.startswith("smtrain:")]
                fault(
                    "files",
                    f"{path!r} {difference}; {len(objects)} objects; the log says"
                    f" {notes[-2:]!r:.300}",
                )
                break
        outside_files = [
            key for key in objects if key.rpartition("/")[2] in ("passwd", "shadow", "hostname")
        ]
        outside_files += [
            key for key in objects if any(f"/links/{name}" in key for name in hostile.OUTSIDE)
        ]
        outside_files += [
            f"{a}/{n}"
            for a, files in contents.items()
            for n in files
            if n.rpartition("/")[2] == "shadow"
        ]
        for key in outside_files[:3]:
            if (
                key in objects
                and hashlib.sha256(self.body(key)).hexdigest() != PASSWD_DIGEST
                and key.endswith("passwd")
            ):
                continue  # one of the job's own files
            fault("leak", f"{key} is in S3")

    def _leftovers(self, name: str, fault: Callable[[str, str], None]) -> None:
        folder, deadline = (
            self.server.state / "jobs" / name / "hosts",
            time.monotonic() + 5 * min(busy(), 4),
        )
        while (
            has_leftovers := folder.exists() or traces(f"{name}/hosts") or traces(name)
        ) and time.monotonic() < deadline:
            time.sleep(0.1)
        if has_leftovers:
            processes = traces(name)
            fault(
                "leftovers",
                (
                    f"processes {processes[:3]}"
                    if processes
                    else f"{folder.relative_to(self.server.state)} is there"
                ),
            )
            self.tainted = True

    def neighbour(self, number: int) -> None:
        """A well-behaved job."""
        name, began = f"neighbour-{number}", time.time()
        with self.lock:
            beside = [plan for plan in self.running.values() if plan]
        metrics = [("good", r"good=([0-9]+)"), ("loss", r"loss=(\S+)")]
        try:
            self.create(name, ["neighbour", name], metrics, None)
            job = self.wait(name, PATIENCE * min(busy(), 2))
        finally:
            with self.lock:
                full = name in self.filled or any(
                    p and "huge" in p.families for p in self.running.values()
                )
                beside += [plan for plan in self.running.values() if plan]
                self.running.pop(name, None)
                self.totals.neighbours += 1
        seeds = sorted({plan.seed for plan in beside})

        def fault(text: str) -> None:
            self.fault(seeds[0] if seeds else -1, "neighbour", f"{text}; next to seeds {seeds}")

        if job is None:
            return fault(f"{name} never ended: {self.describe(name)['SecondaryStatus']}")
        self.ended[name] = job["TrainingJobStatus"]
        reason = job.get("FailureReason", "")
        if (RESTART_REASON in reason and self.killed_during(began)) or (
            full and any(word in reason for word in SPACE)
        ):
            return None
        if job["TrainingJobStatus"] != "Completed":
            return fault(f"{job['TrainingJobStatus']} {reason!r}")
        # Without namespaces in the kernel, the log has one line more.
        if (lines := [line for line in self.lines(name) if not line.startswith("smtrain: ")]) != (
            hostile.neighbour_lines()
        ):
            fault(f"{len(lines)} of {hostile.LINES} lines")
        final = {
            point["MetricName"]: point["Value"] for point in job.get("FinalMetricDataList", [])
        }
        # The service stores metrics in single precision; ours are exactly as printed.
        if final != {"good": hostile.LINES - 1, "loss": float(f"{1 / hostile.LINES:.6f}")}:
            fault(f"metrics {final}")
        for path, body in hostile.good_files(name).items():
            folder, _, inner_path = path.partition("/")
            key = (
                f"checkpoints/{name}/{inner_path}"
                if folder == "checkpoints"
                else f"out/{name}/output/{path}"
            )
            key = key.replace("output/output/", "output/")
            if self.body(key) != body:
                fault(f"{key} differs")
        return None

    def ping(self, stopped_event: threading.Event) -> None:
        """Measure repeatedly how long an answer takes."""
        (client,), silent = self.server.clients("sagemaker"), 0
        while not stopped_event.wait(0.2):
            with self.lock:
                names = list(self.running) or list(self.ended)
            if not names:
                continue
            began, wall, has_answered = time.monotonic(), time.time(), True
            try:
                client.describe_training_job(TrainingJobName=names[0])
            except client.exceptions.ClientError:
                continue  # the job does not exist yet
            except Exception:
                has_answered = False
            took = time.monotonic() - began
            if self.lost.is_set() or self.killed_during(wall):
                continue
            self.totals.answers.append(took)
            silent = 0 if has_answered else silent + 1
            if took > 1.0 * busy():
                with self.lock:
                    seeds = [plan.seed for plan in self.running.values() if plan]
                kind = "slow answer" if has_answered else "no answer"
                if silent < 2:
                    self.fault(
                        seeds[0] if seeds else -1,
                        kind,
                        f"DescribeTrainingJob took {took:.1f} s; seeds {seeds}",
                    )
                else:
                    self.lost.set()

    def block(
        self, seeds: list[int], chance: random.Random, at_once: int
    ) -> tuple[list[int], list[int]]:
        """Run these seeds, kill the plane, compare.

        Returns, if the plane is lost, the seeds that may have caused it and those that have not
        run.
        """
        open_seeds: queue.Queue[int] = queue.Queue()
        for seed in seeds:
            open_seeds.put(seed)
        stop_event, suspects = threading.Event(), set[int]()
        errors: list[BaseException] = []

        def worker() -> None:
            while not self.lost.is_set():
                try:
                    seed = open_seeds.get_nowait()
                except queue.Empty:
                    return
                try:
                    self.run(seed)
                except LostError as error:
                    suspects.add(seed)
                    self.lost.set()
                    errors.append(error)
                except Exception as error:
                    self.fault(seed, "call", repr(error), plan_of(seed, self.options.only))

        def neighbours() -> None:
            while not stop_event.is_set() and not self.lost.is_set():
                try:
                    self.neighbour(time.time_ns())
                except LostError:
                    self.lost.set()
                except Exception as error:
                    self.fault(-1, "neighbour", repr(error))
                    time.sleep(1)

        threads = [threading.Thread(target=worker, daemon=True) for _ in range(at_once)]
        helper_threads = [threading.Thread(target=neighbours, daemon=True)]
        helper_threads += [threading.Thread(target=self.ping, args=(stop_event,), daemon=True)]
        for thread in [*threads, *helper_threads]:
            thread.start()
        if at_once > 1 and chance.random() < 0.5:
            half = len(seeds) // 2
            while open_seeds.qsize() > half and not self.lost.is_set():
                time.sleep(0.1)
            time.sleep(chance.random())
            if not self.lost.is_set():
                self.restart(seeds)
        for thread in threads:
            thread.join()
        stop_event.set()
        for thread in helper_threads:
            thread.join()
        with self.lock:
            suspects |= {plan.seed for plan in self.running.values() if plan}
        remaining_seeds = list(open_seeds.queue)
        if self.lost.is_set():
            if at_once == 1 and errors:
                self.fault(
                    seeds[0], "plane lost", repr(errors[0]), plan_of(seeds[0], self.options.only)
                )
        else:
            self.restart(seeds)
        # A plane that does not start again may have been damaged by any job since its last start.
        started_seeds = [seed for seed in seeds if seed not in remaining_seeds]
        return (started_seeds if self.unstartable else sorted(suspects)), remaining_seeds

    def restart(self, seeds: list[int]) -> None:
        """kill -9, start, and compare the jobs that had ended."""
        began = time.time()
        self.kills.append((began, float("inf")))
        self._note()
        with self.lock:
            previous_states = dict(self.ended)
        self.server.kill()
        try:
            self._connect(self.server.start(60 * min(busy(), 2)))
        except NoStartError as error:
            self.lost.set()
            self.unstartable = True
            self.fault(seeds[0], "no start", f"among seeds {seeds}: {error}")
            return
        finally:
            self.kills[-1] = (began, time.time())
        self.totals.restarts += 1
        pages = self.call(
            lambda: list(
                self.sagemaker.get_paginator("list_training_jobs").paginate(
                    PaginationConfig={"PageSize": 100}
                )
            )
        )
        current_states = {
            s["TrainingJobName"]: s["TrainingJobStatus"]
            for p in pages
            for s in p["TrainingJobSummaries"]
        }
        for name, status in previous_states.items():
            if current_states.get(name) != status:
                seed = int(name.split("-")[1]) if name.startswith("hostile") else -1
                self.fault(
                    seed,
                    "restart",
                    f"{name} was {status} and is {current_states.get(name)} after a restart",
                )

    def _note(self) -> None:
        """Record the server log and the plane's memory."""
        self.totals.causes = {**causes(self.server.logged()), **self.totals.causes}
        with contextlib.suppress(OSError, AttributeError):
            status = Path(f"/proc/{self.server.process.pid}/status").read_text()  # type: ignore[union-attr]
            self.totals.memory_mib.append(int(status.partition("VmRSS:")[2].split()[0]) / 1024)

    def end(self) -> None:
        """Clean up as a user does, and check that nothing is left."""
        self._note()
        if self.lost.is_set() or self.tainted:
            return
        time.sleep(1.5)  # until the last warm pool is over
        from smtrain.plane.client import server_environment

        command = [sys.executable, "-m", "smtrain", "local", "clean", "--all", "--yes"]
        environment = {**server_environment(), "SMTRAIN_HOME": str(self.server.home)}
        result = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        if result.returncode:
            self.fault(-1, "clean", f"status {result.returncode}: {result.stderr[-500:]}")
        jobs = self.call(lambda: self.sagemaker.list_training_jobs(MaxResults=100))[
            "TrainingJobSummaries"
        ]
        keys = list(self.objects(""))
        folders = [path.name for path in (self.server.state / "jobs").iterdir()]
        processes = traces(str(self.server.state / "jobs"))
        for kind, leftovers in (
            ("jobs", jobs),
            ("objects", keys),
            ("folders", folders),
            ("processes", processes),
        ):
            if leftovers:
                self.fault(
                    -1,
                    "clean",
                    f"`smtrain local clean --all` leaves {len(leftovers)} {kind}:"
                    f" {leftovers[:3]!r:.400}",
                )


def _end_fault(plan: Plan, job: dict[str, Any]) -> str | None:
    """Explain how the end of a job differs from its plan."""
    status, secondary, reason = (
        job["TrainingJobStatus"],
        job["SecondaryStatus"],
        job.get("FailureReason", ""),
    )
    ending, detail = plan.end
    if "ModelArtifacts" not in job:
        return "DescribeTrainingJob has no ModelArtifacts"
    if len(reason) > 1024:
        return "a long FailureReason"
    if ending == "sleep":
        if plan.stop is not None:
            return None if (status, secondary) == ("Stopped", "Stopped") else "not stopped"
        return (
            None if (status, secondary) == ("Stopped", "MaxRuntimeExceeded") else "not at its limit"
        )
    if "huge" in plan.families and status == "Failed" and any(word in reason for word in SPACE):
        return None
    if detail == 0:
        return None if status == "Completed" and not reason else "a script that exits with 0"
    import signal

    codes = [detail] if ending == "exit" else [99, 128 + getattr(signal, detail)]
    if status != "Failed" or not reason.startswith("AlgorithmError: "):
        return "a script that fails"
    if not any(reason.endswith(f", exit code: {code}") for code in codes):
        return f"exit code {codes}"
    texts = [args["kind"] for family, args in plan.steps if family == "failure"]
    moves_folders = any(family == "replaced" for family, _ in plan.steps)
    if texts[:1] == ["text"] and not moves_folders and "hostile text" not in reason:
        return "the text of /opt/ml/output/failure is missing"
    return None


def _unpack_archive(archive: bytes) -> dict[str, bytes]:
    import io
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = [member for member in tar if member.isfile() and member.size < 1 << 20]
        return {member.name: tar.extractfile(member).read() for member in files}  # type: ignore[union-attr]


@contextlib.contextmanager
def home(options: argparse.Namespace, totals: Totals) -> Iterator[Home]:
    """A new home, if possible on its own file system, because a job may fill it."""
    with scratch("2G") as folder:
        new_home = Home(folder, options, totals)
        try:
            yield new_home
            new_home.end()
        finally:
            new_home.lost.set()
            new_home.server.kill()
            for line in traces(str(new_home.server.home)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(line.split()[0]), 9)


def fuzz(options: argparse.Namespace) -> Totals:
    """Run all seeds, in blocks; a home is used until it is lost or tainted."""
    totals, chance = Totals(), random.Random(options.seed)
    seeds: Iterator[int] = itertools.count(options.seed)
    if options.only:  # otherwise most jobs would do nothing
        seeds = (seed for seed in seeds if plan_of(seed, options.only).steps)
    todo = list(itertools.islice(seeds, options.jobs))
    while todo:
        suspects: list[int] = []
        with home(options, totals) as new_home:
            while todo and not new_home.lost.is_set() and not new_home.tainted:
                block, todo = todo[:BLOCK], todo[BLOCK:]
                began = time.monotonic()
                suspects, remaining_seeds = new_home.block(block, chance, options.at_once)
                todo = remaining_seeds + todo
                print(
                    f"{totals.jobs} jobs, {len(totals.faults)} faults,"
                    f" {time.monotonic() - began:.0f} s for the block",
                    file=sys.stderr,
                    flush=True,
                )
        if new_home.lost.is_set() and options.jobs > 1:
            run_separately(options, totals, suspects)
    return totals


def run_separately(options: argparse.Namespace, totals: Totals, suspects: list[int]) -> None:
    """Run jobs that may have ended a plane one by one, each in a new home, until one does it
    again.
    """
    for seed in suspects:
        with home(options, totals) as new_home:
            new_home.block([seed], random.Random(seed), 1)
        if new_home.lost.is_set():
            return


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--jobs", type=int, default=500, help="how many seeds")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--at-once", type=int, default=4, help="hostile jobs at the same time")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[],
        metavar="A,B",
        help="these families",
    )
    parser.add_argument(
        "--without", type=lambda text: text.split(","), default=[], metavar="A,B", help="not these"
    )
    parser.add_argument("--no-namespaces", action="store_true", help="as on a kernel that has none")
    parser.add_argument("--show", action="store_true", help="print the plans and run nothing")
    options = parser.parse_args()
    for family in {*options.only, *options.without} - hostile.FAMILIES.keys():
        parser.error(f"no family {family!r}; there are {', '.join(hostile.FAMILIES)}")
    if options.show:
        for seed in range(options.seed, options.seed + options.jobs):
            print(seed, plan_of(seed, options.only).text())
        return
    began = time.monotonic()
    totals = fuzz(options)
    report(totals, time.monotonic() - began, options.json)
    sys.exit(1 if totals.faults else 0)


def report(totals: Totals, seconds: float, as_json: bool) -> None:
    """Print the figures, the faults by kind, and the tracebacks that the planes wrote to their
    logs.
    """
    by_kind: dict[str, list[int]] = defaultdict(list)
    for fault in totals.faults:
        by_kind[fault.kind].append(fault.seed)
    answers = sorted(totals.answers) or [0.0]
    figures = {
        "jobs": totals.jobs,
        "neighbours": totals.neighbours,
        "restarts": totals.restarts,
        "seconds": round(seconds),
        "faults": len(totals.faults),
        "fault_seeds": {kind: sorted(set(seeds)) for kind, seeds in by_kind.items()},
        "ends": dict(totals.ends),
        "answer_s_median": round(statistics.median(answers), 3),
        "answer_s_p99": round(answers[int(0.99 * (len(answers) - 1))], 3),
        "answer_s_max": round(answers[-1], 3),
        "plane_mib_first": round(totals.memory_mib[0]) if totals.memory_mib else None,
        "plane_mib_last": round(totals.memory_mib[-1]) if totals.memory_mib else None,
        "tracebacks": sorted(totals.causes),
    }
    if as_json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        if name != "tracebacks":
            print(f"{name:18} {value}")
    for cause, text in totals.causes.items():
        print(f"\nserver.log: {cause}\n{text}")


if __name__ == "__main__":
    main()
