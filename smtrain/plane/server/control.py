"""The control plane's own calls, POST /smtrain/control/NAME with a JSON body: the switches behind `Plane`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from smtrain.plane.client import CONTROL_PATH, Endpoint
from smtrain.plane.server import schedules, streams, synthetic, validation
from smtrain.plane.server.executor import Executor
from smtrain.plane.server.jobs import JobRecord
from smtrain.plane.testing.faults import Faults

Handler = Callable[[dict[str, Any]], dict[str, Any]]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15  # nan is not


def _whole(value: Any) -> bool:
    return isinstance(value, int) and _number(value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _list_of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(kind, value))


def _map_of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(kind, value.values()))


# The keys of each call and their types. A value of another type would do harm later, in every request that meets it.
TAKES: dict[str, dict[str, Callable[[Any], bool]]] = {
    "faults": {
        "clear": _flag, "operations": _list_of(_text), "throttle": _number, "errors": _number, "drops": _number,
        "after": _number, "rate": _number, "times": _whole, "seed": _whole,
    },
    "delivery": {
        "late": _number, "reorder": _number, "late_streams": _number, "empty_pages": _number, "seed": _whole,
    },
    "synthetic": {
        "name": _text, "hosts": _whole, "lines": _whole, "seconds": _number, "instance_type": _text, "end": _text,
        "reason": _text, "last_words": _map_of(_list_of(_text)), "held": _flag,
    },
    "release": {"job": _text},
    "grace": {"seconds": _number},
    "capacity": {
        "clear": _flag, "instance_type": _text, "seconds": _number, "attempts": _whole, "pending": _number,
        "spot_only": _flag,
    },
    "spot": {"after": _list_of(_number), "away": _number, "saving": _number},
    "quotas": {"clear": _flag, "values": _map_of(_number)},
    "interrupt": {"job": _text, "kind": _text},
    "schedules": {"ahead": _number},
    "hosts": {"run_in": _text, "image": _text, "memory": _text, "cpus": _text},
}  # fmt: skip
SYNTHETIC: dict[str, Any] = {
    "hosts": 1, "lines": 100, "seconds": 0.0, "instance_type": "ml.trn1.32xlarge", "end": "Completed", "reason": None,
    "last_words": {},
}  # fmt: skip
NEEDS = {
    "synthetic": ("name",), "release": ("job",), "grace": ("seconds",), "interrupt": ("job", "kind"),
}  # fmt: skip


def _checked(name: str, asked: Any) -> dict[str, Any]:
    """The keys that a call is given, without null ones. Raises ValueError for a key or value that it does not take."""
    if not isinstance(asked, dict):
        raise ValueError("the body must be a JSON object")
    given = {key: value for key, value in asked.items() if value is not None}
    for key, value in given.items():
        if key not in TAKES[name]:
            raise ValueError(f"there is no {key!r}; it takes {', '.join(TAKES[name])}")
        if not TAKES[name][key](value):
            raise ValueError(f"{key} is {str(value)[:60]}, of a type that it cannot be")
    if missing := [key for key in NEEDS.get(name, ()) if key not in given]:
        raise ValueError(f"it needs {' and '.join(missing)}")
    return given


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
        status, told = self._answer(path.removeprefix(CONTROL_PATH), environ)
        body = json.dumps(told).encode()
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    def _answer(self, name: str, environ: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Status and answer. A mistake of the caller is a 400; what else a handler raises is the guard's."""
        handler = self.handlers.get(name)
        if handler is None:
            return "404 Not Found", {"error": f"no such control call or job: {name!r}"}
        try:
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            asked = _checked(name, json.loads(body or b"{}"))
        except (ValueError, RecursionError) as error:
            said = "the body is nested too deeply" if isinstance(error, RecursionError) else str(error)
            return "400 Bad Request", {"error": f"{name}: {said}"}
        try:
            return "200 OK", handler(asked)
        except KeyError as error:
            return "404 Not Found", {"error": f"no such control call or job: {error}"}
        except (TypeError, ValueError, OverflowError) as error:
            return "400 Bad Request", {"error": str(error)}

    def connect(self, faults: Faults, executor: Executor, endpoint: Endpoint) -> None:
        """Name everything that can be switched."""

        held: dict[str, synthetic.SyntheticRun] = {}

        def make(asked: dict[str, Any]) -> dict[str, Any]:
            asked = {**SYNTHETIC, **asked}
            request = synthetic.request_of(asked, endpoint.role, endpoint.bucket)
            if fault := validation.fault_of("sagemaker", "CreateTrainingJob", request):
                raise ValueError(fault)
            if asked["end"] not in ("Completed", "Failed") or min(asked["hosts"], asked["lines"], asked["seconds"]) < 0:
                raise ValueError("end is Completed or Failed; hosts, lines and seconds are not negative")

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
            if asked["seconds"] < 0:
                raise ValueError(f"seconds is {asked['seconds']}; it must not be negative")
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
