"""A Slurm cluster as a backend: submit, describe, list and stop jobs, read their lines and
files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, Literal

from smtrain.client.backends.base import Pace
from smtrain.client.backends.description import definitions, final_metrics, summary
from smtrain.client.backends.sagemaker.retry import retry_while_lost
from smtrain.client.backends.slurm import copying
from smtrain.client.backends.slurm.logs import LogFiles
from smtrain.client.backends.slurm.paths import SCHEME, is_visible, path_of, uri_of
from smtrain.client.backends.slurm.registry import REGISTRY
from smtrain.client.backends.slurm.remote_shell import Head, HeadError, HeadLostError
from smtrain.client.backends.slurm.script import (
    HISTORY,
    REQUEST,
    SCRIPT,
    STOP,
    WORDS,
    define_bare,
    sbatch_script,
)
from smtrain.client.backends.slurm.state import (
    QUEUE,
    QueueRow,
    description,
    events_of,
    queue_rows,
    state_of,
)
from smtrain.core.config.cluster import Cluster
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.targets import GRACE, TARGETS
from smtrain.core.text import Say, say

_LAST_LINES = 200  # of a job's log: the totals of a stage are among them
# Finds the line of Slurm's output that explains an attempt's end; skips reports that tasks ended or
# were signalled.
_CAUSE = r"""
/[Ee]xited with exit code|Terminating StepId|Job step aborted|Force Terminated/ { next }
/tasks? [0-9,-]+: (Terminated|Killed)/ { next }
/CANCELLED AT [^ ]+ \*\*\*/ { next }
/[Ee]rror|fatal|oom|OOM|[Oo]ut [Oo]f [Mm]emory|DUE TO|[Cc]annot|denied|not found|No such/ { print; exit }
"""
# squeue runs first: a job that ends after that has written its end before it left the queue.
# NUL separates the parts of an answer: lines may be of any length.
_ROW = f"""for f in nodes/*/output/failure; do [ -f "$f" ] && break; done
  {{ if [ -f "$f" ]; then head -c 1024 "$f"
  elif why=$(head -c 65536 {WORDS} 2>/dev/null | awk '{_CAUSE}') && [ -n "$why" ]; then printf '%s\\n' "$why"
  elif [ -s logs/algo-1.log ]; then tail -n 1 logs/algo-1.log | cut -d' ' -f2-
  else tail -n 2 {WORDS} 2>/dev/null | tr '\\n' ' '; fi; }} 2>/dev/null | head -c 4096 | tr -d '\\0'"""
_LOOK = f"""
queue=$(squeue -h -t all -o '{QUEUE}' ${{3:+-n "$3"}} 2>/dev/null) || queue=unreachable
printf '%s\\0' "$queue"
for d in "$1"/*/jobs/$2/; do
  cd "$d" 2>/dev/null || continue
  asked=; [ -e {STOP} ] && asked=yes
  printf '%s\\0%s\\0' "$d" "$asked"; cat {HISTORY} 2>/dev/null; printf '\\0'
  if [ -n "$3" ]; then cat {REQUEST} 2>/dev/null; printf '\\0'; {_ROW}; else printf '\\0'; fi
  printf '\\0'
done
"""
# Two launches may try at once: one makes the folder, the other joins.
_SUBMIT = f"""
job=$1; request=$2; at=$3; size=$4; shift 4
mkdir -p "$(dirname "$job")" || exit 1
if ! mkdir "$job" 2>/dev/null; then
  [ -d "$job" ] || {{ mkdir "$job"; exit 1; }}
  for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do  # the other may be about to queue it
    [ -d "$job" ] && [ ! -s "$job/id" ] && ! grep -q '"start"' "$job/{HISTORY}" 2>/dev/null && sleep 1
  done
  [ -d "$job" ] && echo taken && exit 0
  mkdir "$job" || exit 1  # it was refused
fi
cat >"$job/{SCRIPT}" && [ "$(wc -c <"$job/{SCRIPT}")" -eq "$size" ] && printf '%s\\n' "$request" >"$job/{REQUEST}" \\
  && printf '{{"at": %s, "event": "submitted"}}\\n' "$at" >"$job/{HISTORY}" \\
  && id=$(bare sbatch --parsable --export=ALL "$@" "$job/{SCRIPT}") || {{ rm -rf "$job"; exit 1; }}
echo "${{id%%;*}}" >"$job/id"
echo "$id"
"""
_STOP = f"""
job=$1
touch "$job/{STOP}" || exit 1
id=$(sed -n 's/.*"event": "start", "id": "\\([0-9]*\\)".*/\\1/p' "$job/{HISTORY}" 2>/dev/null | tail -n 1)
[ -n "$id" ] || id=$(cat "$job/id" 2>/dev/null)
[ -n "$id" ] || exit 0
scancel --quiet --state=PENDING "$id"
scancel --quiet --batch --signal=USR2 --state=RUNNING "$id"
exit 0
"""


@dataclass(frozen=True)
class SlurmBackend:
    """One cluster, as the section `cluster` describes it."""

    section: Cluster
    name: Literal["slurm"] = "slurm"

    def __post_init__(self) -> None:
        if self.section.shared is None:
            raise ConfigError(
                "cluster.shared: is missing; name a folder that all nodes see, such as /fsx/smtrain"
                " (target slurm)",
                code="config.missing_key",
            )

    @cached_property
    def head(self) -> Head:
        return Head(self.section.host)

    @property
    def shared_folder(self) -> str:
        return str(self.section.shared)

    # ---- what a request is filled in with
    record = TARGETS["slurm"]
    grace = GRACE
    # Nodes write the files of logs through a shared folder, whose clients cache for some seconds.
    pace = Pace(2, 2, 20, 4, 120, ((0, 20), (30, 120), (300, 600), (inf, 3600)), 3600, (0.5, 5), 2)

    def region_name(self) -> str:
        return "us-east-1"  # its prices are the estimate for machines elsewhere

    def role(self, _role: str | None) -> str:
        return ""

    def base(self, _uri: str | None) -> str:
        """Everything is on the shared folder."""
        return uri_of(self.shared_folder)

    def in_place(self, path: Path | str) -> str | None:
        """The URI of a folder or file that the nodes can see; None if it must be copied to them."""
        if str(path).startswith(SCHEME):
            return str(path)
        if self.section.host is not None or not is_visible(path, self.section):
            return None
        return uri_of(str(Path(path).resolve()))

    # ---- submit
    def put(self, uri: str, files: copying.Files, say: Say) -> None:
        """Copy files below a URI unless they are there with the same content."""
        copying.send(self.head, self.shared_folder, path_of(uri).rstrip("/"), files, say)

    def submit(
        self, request: Mapping[str, Any], predecessors: Sequence[str] = (), say: Say = say
    ) -> str | None:
        """Queue a request after jobs with these Slurm IDs; returns its own ID, or None if the job
        exists already.

        Raises `JobError` with Slurm's message if it is refused; nothing of it stays then.
        """
        name = request["TrainingJobName"]
        options = (
            [f"--dependency=afterok:{':'.join(predecessors)}", "--kill-on-invalid-dep=yes"]
            if predecessors
            else []
        )
        job = f"{path_of(request['OutputDataConfig']['S3OutputPath'])}/{name}"
        script = sbatch_script(request, self.section).encode()
        arguments = (job, json.dumps(request), str(int(time.time())), str(len(script)), *options)
        output = b""

        def attempt() -> None:
            nonlocal output
            output = self.head.run(
                "sh", "-c", define_bare(self.section) + _SUBMIT, "sh", *arguments, feed=script
            )

        try:
            copying.retry_while_cut_off(
                attempt, say
            )  # if the answer was lost, the next attempt finds the job
        except HeadError as error:
            raise JobError(f"{name} was not submitted: {error}") from None
        REGISTRY.remember(self.section, name)
        answer = output.decode().strip()
        return None if answer == "taken" else answer.partition(";")[0]

    def queued_id(self, name: str) -> str | None:
        """The Slurm ID of a waiting or running job."""
        row = queue_rows(self.head.run("squeue", "-h", "-o", QUEUE, "-n", name).decode()).get(name)
        return row.id if row and not row.has_ended else None

    # ---- describe, list, stop
    def describe(self, name: str, patience: Any) -> dict[str, Any]:
        for job in self._describe_jobs(name, patience, job_name=name):
            if job["TrainingJobStatus"] == "Completed" and (metric_definitions := definitions(job)):
                job["FinalMetricDataList"] = final_metrics(
                    metric_definitions, self.last_events(name, _LAST_LINES, patience)
                )
            return job
        raise JobError(
            f"{name}: no such job below {self.shared_folder} ({self.head.name}); `smtrain list"
            " --target slurm`",
            code="job.not_found",
        )

    def rows(self, contains: str | None, page: int) -> Iterator[list[dict[str, Any]]]:
        jobs = self._describe_jobs(f"*{contains or ''}*", None)
        yield [
            summary(job) for job in sorted(jobs, key=lambda job: job["CreationTime"], reverse=True)
        ]

    def stop(self, name: str) -> None:
        """Ask a job to save and end; a waiting job is removed from the queue."""
        self.head.sh(_STOP, self._folder(name))

    def preview(self, requests: Sequence[Mapping[str, Any]]) -> str:
        return "\n".join(sbatch_script(request, self.section) for request in requests)

    def tags(self, job: Mapping[str, Any]) -> list[dict[str, str]]:
        return list(job.get("Tags", []))

    # ---- lines
    def log_page(
        self,
        name: str,
        host: str | None,
        start: int,
        pattern: str | None,
        token: str | None,
        patience: Any,
    ) -> dict[str, Any]:
        """One page with all events from a time (ms) on."""
        return {
            "events": retry_while_lost(
                lambda: self._log(name).since(start, host, pattern), patience, HeadLostError
            )
        }

    def last_events(self, name: str, count: int, patience: Any) -> list[dict[str, Any]]:
        return self._log(name).last(count)

    # ---- files
    def listing(self, uri: str) -> list[dict[str, Any]]:
        """Files below a URI, in the form of S3's listing; the time of the last change stands for
        the ETag.
        """
        folder = path_of(uri).rstrip("/")
        stamps = sorted(self.head.stamps(folder).items())
        return [
            {"Key": f"{folder}/{path}", "Size": size, "ETag": modified_at}
            for path, (size, modified_at) in stamps
        ]

    def read(self, uri: str) -> bytes:
        content = self.head.read(path_of(uri))
        if content is None:
            raise JobError(f"{path_of(uri)} does not exist on {self.head.name}; check the path")
        return content

    def fetch(self, _bucket: str, key: str, path: Path) -> None:
        copying.fetch(self.head, key, path, lambda text: say(text, error=True))

    # ---- within
    @cached_property
    def _logs(self) -> dict[str, LogFiles]:
        return {}

    @cached_property
    def _folders(self) -> dict[str, str]:
        return {}

    def _log(self, name: str) -> LogFiles:
        if name not in self._logs:
            self._logs[name] = LogFiles(self.head, name, f"{self._folder(name)}/logs")
        return self._logs[name]

    def _folder(self, name: str) -> str:
        if name not in self._folders:
            folder = self.head.sh(
                'for d in "$1"/*/jobs/"$2"; do [ -d "$d" ] && printf %s "$d"; done; :',
                self.shared_folder,
                name,
            )
            if not folder:
                raise JobError(
                    f"{name}: no such job below {self.shared_folder} ({self.head.name}); `smtrain"
                    " list --target slurm`",
                    code="job.not_found",
                )
            self._folders[name] = folder.decode()
        return self._folders[name]

    def _describe_jobs(
        self, pattern: str, patience: Any, job_name: str = ""
    ) -> Iterator[dict[str, Any]]:
        output = retry_while_lost(
            lambda: self.head.sh(_LOOK, self.shared_folder, pattern, job_name),
            patience,
            HeadLostError,
        )
        queue, *parts = output.decode(errors="replace").split("\0")
        rows: dict[str, QueueRow] = {} if queue == "unreachable" else queue_rows(queue)
        for at in range(0, len(parts) - 4, 5):
            folder, stop, history, request, failure = parts[at : at + 5]
            name = folder.rstrip("/").rpartition("/")[2]
            events, row = events_of(history), rows.get(name)
            # Without events and not in the queue: a folder that a launch is making, or has
            # abandoned. A script that was submitted by hand is in the queue before its first event,
            # which it writes when it starts.
            if not events and not row:
                continue
            state = state_of(
                events,
                row,
                stopping=bool(stop),
                failure=failure.strip(),
                reachable=queue != "unreachable",
            )
            base = uri_of(folder.rstrip("/").rpartition("/")[0])
            job_request = (
                json.loads(request)
                if request.strip()
                else {
                    "TrainingJobName": name,
                    "OutputDataConfig": {"S3OutputPath": base},
                    "ResourceConfig": {},
                }
            )
            yield description(job_request, events, state, row)


BACKEND = SlurmBackend
