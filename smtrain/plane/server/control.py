"""The control plane's own calls, POST /smtrain/control/NAME with a JSON body: the switches behind
`Plane`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from smtrain.plane.client import CONTROL_PATH
from smtrain.plane.server import logs_api
from smtrain.plane.server.executor import Executor
from smtrain.plane.server.faults import Faults

Handler = Callable[[dict[str, Any]], dict[str, Any]]
Check = Callable[[Any], bool]


def is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
    )  # nan is not


def is_whole_number(value: Any) -> bool:
    return isinstance(value, int) and is_number(value)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def list_of(kind: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(kind, value))


def map_of(kind: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(kind, value.values()))


# The keys of each call and their types. A value of another type would do harm later, in every
# request that meets it.
TAKES: dict[str, dict[str, Check]] = {
    "faults": {
        "clear": is_flag,
        "operations": list_of(is_text),
        "throttle": is_number,
        "errors": is_number,
        "drops": is_number,
        "after": is_number,
        "rate": is_number,
        "times": is_whole_number,
        "seed": is_whole_number,
    },
    "delivery": {
        "late": is_number,
        "reorder": is_number,
        "late_streams": is_number,
        "empty_pages": is_number,
        "seed": is_whole_number,
    },
    "grace": {"seconds": is_number},
    "capacity": {
        "clear": is_flag,
        "instance_type": is_text,
        "seconds": is_number,
        "attempts": is_whole_number,
        "pending": is_number,
        "spot_only": is_flag,
        "region": is_text,
    },
    "spot": {"after": list_of(is_number), "away": is_number, "saving": is_number},
    "quotas": {"clear": is_flag, "values": map_of(is_number), "region": is_text},
    "interrupt": {"job": is_text, "kind": is_text},
    "hosts": {"run_in": is_text, "image": is_text, "memory": is_text, "cpus": is_text},
}
NEEDS: dict[str, tuple[str, ...]] = {"grace": ("seconds",), "interrupt": ("job", "kind")}


class Control:
    """WSGI middleware behind the gate: it answers its own calls, everything else is an AWS call."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.handlers: dict[str, Handler] = {}
        self.takes, self.needs = dict(TAKES), dict(NEEDS)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if not path.startswith(CONTROL_PATH):
            answer: Iterable[bytes] = self.app(environ, start_response)
            return answer
        status, reply = self._answer(path.removeprefix(CONTROL_PATH), environ)
        body = json.dumps(reply).encode()
        start_response(
            status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        )
        return [body]

    def _answer(self, name: str, environ: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Status and answer.

        A mistake of the caller is a 400; what else a handler raises reaches the guard.
        """
        handler = self.handlers.get(name)
        if handler is None:
            return "404 Not Found", {"error": f"no such control call or job: {name!r}"}
        try:
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            options = self._parse_options(name, json.loads(body or b"{}"))
        except (ValueError, RecursionError) as error:
            reason = (
                "the body is nested too deeply" if isinstance(error, RecursionError) else str(error)
            )
            return "400 Bad Request", {"error": f"{name}: {reason}"}
        try:
            return "200 OK", handler(options)
        except KeyError as error:
            return "404 Not Found", {"error": f"no such control call or job: {error}"}
        except (TypeError, ValueError, OverflowError) as error:
            return "400 Bad Request", {"error": str(error)}

    def _parse_options(self, name: str, body: Any) -> dict[str, Any]:
        """The options of a call, without null ones.

        Raises ValueError for a key or value that it does not take.
        """
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        options = {key: value for key, value in body.items() if value is not None}
        for key, value in options.items():
            if key not in self.takes[name]:
                raise ValueError(f"there is no {key!r}; it takes {', '.join(self.takes[name])}")
            if not self.takes[name][key](value):
                raise ValueError(f"{key} is {str(value)[:60]}, of a type that it cannot be")
        if missing_keys := [key for key in self.needs.get(name, ()) if key not in options]:
            raise ValueError(f"it needs {' and '.join(missing_keys)}")
        return options

    def connect(self, faults: Faults, executor: Executor) -> None:
        """Set the handlers."""

        def grace(options: dict[str, Any]) -> dict[str, Any]:
            if options["seconds"] < 0:
                raise ValueError(f"seconds is {options['seconds']}; it must not be negative")
            executor.grace = float(options["seconds"])
            return {"seconds": executor.grace}

        self.handlers |= {
            "faults": faults.control,
            "delivery": logs_api.control,
            "grace": grace,
            "capacity": executor.capacity.control,
            "spot": executor.capacity.control_spot,
            "quotas": executor.quotas.control,
            "interrupt": executor.interrupt,
            "hosts": executor.set_hosts,
        }
