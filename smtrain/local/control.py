"""The control plane's own calls, POST /smtrain/control/NAME with a JSON body: the switches behind `Plane`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from smtrain.aws.local_plane import CONTROL_PATH, Endpoint
from smtrain.local import schedules, streams, synthetic
from smtrain.local.executor import Executor
from smtrain.local.jobs import JobRecord
from smtrain.testing.faults import Faults

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class Control:
    """WSGI middleware behind the gate: what it knows it answers, everything else is an AWS call."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.handlers: dict[str, Handler] = {}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if not path.startswith(CONTROL_PATH):
            answer: Iterable[bytes] = self.app(environ, start_response)
            return answer
        asked = json.loads(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)) or b"{}")
        status = "200 OK"
        try:
            told = self.handlers[path.removeprefix(CONTROL_PATH)](asked)
        except KeyError as error:
            status, told = "404 Not Found", {"error": f"no such control call or job: {error}"}
        except (TypeError, ValueError) as error:
            status, told = "400 Bad Request", {"error": str(error)}
        body = json.dumps(told).encode()
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    def connect(self, faults: Faults, executor: Executor, endpoint: Endpoint) -> None:
        """Name everything that can be switched."""

        held: dict[str, synthetic.SyntheticRun] = {}

        def make(asked: dict[str, Any]) -> dict[str, Any]:
            request = synthetic.request_of(asked, endpoint.role, endpoint.bucket)

            def life(job: JobRecord) -> synthetic.SyntheticRun:
                run = synthetic.SyntheticRun(executor, job, asked)
                if asked.get("held"):
                    held[job.name] = run
                return run

            job = executor.submit(request, life)
            if job is None:
                raise ValueError(f"a job named {asked['name']} exists already")
            return {"name": job.name}

        def release(asked: dict[str, Any]) -> dict[str, Any]:
            held[asked["job"]].release()
            return {}

        def grace(asked: dict[str, Any]) -> dict[str, Any]:
            executor.grace = float(asked["seconds"])
            return {"seconds": executor.grace}

        self.handlers.update(
            {
                "faults": faults.control,
                "delivery": streams.control,
                "synthetic": make,
                "release": release,
                "grace": grace,
                "capacity": executor.capacity.control,
                "spot": executor.capacity.control_spot,
                "quotas": executor.quotas.control,
                "interrupt": executor.interrupt,
                "schedules": schedules.control,
                "hosts": executor.set_hosts,
            }
        )
