"""A job that does odd but legal things in its sandbox, chosen by a seed.

    python3 -I -S hostile_job.py SEED JOB [FAMILY ...]
    python3 -I -S hostile_job.py neighbour JOB

The first writes a good checkpoint, model and output, then takes the steps of `plan_of(SEED)`. The
second behaves well. `scripts/bench hostile` runs both and reads the same plan to know how the job
must end. Imports only the standard library, as a job's host runs this file.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

ROOT = os.environ.get("SMTRAIN_ML_ROOT", "/opt/ml")
FOLDERS = ("model", "checkpoints", "output", "output/data")
UPLOADED = ("model", "checkpoints", "output/data")
CACHE = "sagemaker/warmpoolcache"
BAIT = "a" * 41 + "!"
LINES = 200
"""Lines of the neighbour."""

# Names that S3 takes as they are; each must arrive.
FINE = (
    "-rf",
    "--help",
    "a b",
    " lead",
    "trail ",
    "a+b",
    "100%",
    "%2e%2e",
    "a?b",
    "a#b",
    "a&b=c",
    "\u00fc",
    "\u65e5\u672c",
    "\U0001f600",
    "e\u0301",
    "x" * 255,
    "...",
    "..a",
    "a..",
    "~",
    "$HOME",
    "`id`",
    "a\\b",
    "'\"",
    "*",
    "a;b",
    ".hidden",
    "manifest.json",
    "CON",
    "a:b",
    "[x]",
    "{0}",
    "%s",
    "\u00e9" * 127,
    "<b>",
    "]]>",
)
# Names that may be left out if the log says so: control characters and names that are not UTF-8.
ODD = (
    b"a\nb",
    b"\n",
    b"a\tb",
    b"\x01",
    b"\x7f",
    b"\x1b[31mred",
    b"\r",
    "\u202egnp".encode(),
    "\ufeff".encode(),
    "\u2028".encode(),
    "\uffff".encode(),
    b"\xff",
    b"caf\xe9",
    b"\xed\xa0\x80",
    b"\x80" * 255,
    b"%\xff",
    b"\xc0\xaf..",
)
NUMBERS = (
    "nan",
    "NaN",
    "-nan",
    "inf",
    "-inf",
    "Infinity",
    "1e999",
    "-1e999",
    "1e308",
    "1.7976931348623157e308",
    "5e-324",
    "1e-400",
    "1_000",
    "0x10",
    "0x1p3",
    "",
    "\u0661\u0662",
    "\uff11\uff12",
    "1e",
    "--1",
    ".5",
    "5.",
    "+3",
    "1,5",
    "None",
    "True",
    "9" * 400,
    "1e+",
    "1e400",
    "-0",
    "00",
    "1.2.3",
    "\u00bd",
    "1\u00a0",
    "1\x00",
)
LINKS = (
    ("dangling", "nothing"),
    ("itself", "itself"),
    ("up", ".."),
    ("here", "."),
    ("passwd", "/etc/passwd"),
    ("all", "/"),
    ("climbs", "../" * 30 + "etc/passwd"),
    ("environ", "/proc/self/environ"),
    ("model", "/opt/ml/model"),
    ("checkpoints", "/opt/ml/checkpoints"),
    ("config", "/opt/ml/input/config/hyperparameters.json"),
    ("odd", "\udcff"),
    ("long", "x" * 4000),
    ("many", "a/" * 1500),
    ("empty-part", "/opt/ml//model/./good.bin"),
    ("proc", "/proc/1/root"),
    ("tty", "/dev/stdin"),
    ("back", "/opt/ml/../../etc/passwd"),
)
OUTSIDE = ("passwd", "all", "climbs", "environ", "proc", "tty", "back")
"""Links that lead out of /opt/ml."""
METRICS = (
    ("loss", r"loss=(\S+)"),
    ("any", r"loss=(\S*)"),
    ("all", r"loss=(.*)"),
    ("strict", r"loss=([0-9.eE+-]+)"),
    ("none", r"loss=\S+"),
    ("two", r"(lo)ss=(\S+)"),
    ("optional", r"acc=(\d+)?"),
    ("either", r"x=(\d+)|loss="),
    ("empty", r"()loss"),
    ("unicode", r"loss=(\d+)"),
    ("ahead", r"(?=loss=(\S+))"),
    ("last", r"loss=(\S+)$"),
)
SIGNALS = ("SIGSEGV", "SIGABRT", "SIGKILL", "SIGTERM", "SIGHUP", "SIGBUS")


@dataclass
class Plan:
    """The job of a seed: the steps, the end, and the request."""

    seed: int
    steps: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    end: tuple[str, Any] = ("exit", 0)
    """("exit", code), ("signal", name) or ("sleep", None): until it is ended."""
    limit: int = 120
    """MaxRuntimeInSeconds."""
    stop: float | None = None
    """Seconds after its creation at which StopTrainingJob is called."""
    hosts: int = 1
    warm: bool = False
    """KeepAlivePeriodInSeconds; the first step with a folder then uses the pool's cache."""
    archive: bool = False
    """CompressionType GZIP."""
    pause: float = 0.0
    metrics: list[tuple[str, str]] = field(default_factory=list)

    @property
    def families(self) -> set[str]:
        return {name for name, _ in self.steps}

    def text(self) -> str:
        """One line for a report."""
        text = ", ".join(f"{name}{json.dumps(args) if args else ''}" for name, args in self.steps)
        more = f", stop after {self.stop:.1f} s" if self.stop is not None else ""
        more += ", warm" if self.warm else ""
        return f"{text}; ends with {self.end}, limit {self.limit} s, {self.hosts} hosts{more}"


def content(seed: int | str, name: str, size: int = 3000) -> bytes:
    """The bytes of a good file."""
    return random.Random(f"{seed} {name}").randbytes(size)


def good_files(seed: int | str) -> dict[str, bytes]:
    """The good files of every job, by path below /opt/ml: a checkpoint, its manifest last, a model
    and an output.
    """
    parts = {f"checkpoints/good/part-{i}": content(seed, f"part-{i}") for i in range(2)}
    manifest = json.dumps({name: len(body) for name, body in parts.items()}).encode()
    return {
        **parts,
        "checkpoints/good/manifest.json": manifest,
        "model/good.bin": content(seed, "model"),
        "output/data/good.txt": content(seed, "output"),
    }


def plan_of(seed: int, only: list[str] | None = None) -> Plan:
    """The plan of a seed, `only` with the steps of these families."""
    chance = random.Random(seed)
    plan = Plan(seed, pause=chance.choice([0.0, 0.2, 0.5, 1.0, 2.5]), archive=chance.random() < 0.5)
    names = list(FAMILIES)
    weights = [WEIGHTS.get(name, 1.0) for name in names]
    for name in chance.choices(names, weights, k=chance.randrange(2, 7)):
        plan.steps.append((name, FAMILIES[name][0](chance)))
    if chance.random() < 0.3:
        plan.hosts = 2
    if chance.random() < 0.2:
        plan.warm = True
        args = next((a for name, a in plan.steps if "folder" in a and name != "replaced"), {})
        args.update({"folder": CACHE} if args else {})
    how = chance.random()
    if how < 0.45:
        plan.end = ("exit", chance.choice([0, 0, 0, 0, 1, 2, 77, 127, 137, 255]))
    elif how < 0.6:
        plan.end = ("signal", chance.choice(SIGNALS))
    elif how < 0.75:
        plan.end, plan.limit = ("sleep", None), chance.choice([1, 2])
    else:
        plan.end, plan.stop = ("sleep", None), chance.uniform(0.0, 2.5)
    metrics = chance.sample(METRICS, chance.randrange(1, 6))
    plan.metrics = [("good", r"good=([0-9]+)"), *metrics]
    if only:
        plan.steps = [step for step in plan.steps if step[0] in only]
    if "huge" in plan.families:
        plan.archive = False  # an archive of a terabyte takes an hour
    if "backtracking" in plan.families:
        plan.metrics += [("slow", r"((a+)+)$"), ("slower", r"(a|aa)+$")]
    if "digits" in plan.families:
        plan.metrics.append(("digits", r"(\d)"))
    return plan


def _folder(chance: random.Random) -> str:
    return chance.choice(FOLDERS)


def _path(*parts: str | bytes) -> bytes:
    return os.path.join(os.fsencode(ROOT), *map(os.fsencode, parts))


def _write(path: bytes, body: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with _opened(path) as file:
        file.write(body)


def _opened(path: bytes) -> BinaryIO:
    """Open a file for writing, without waiting for a pipe that an earlier step has put there."""
    return os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644), "wb"
    )


def names(folder: str, which: list[int], odd: list[int]) -> None:
    for i in which:
        _write(_path(folder, "names", FINE[i]), content(0, FINE[i], 50))
    for i in odd:
        _write(_path(folder, "odd", ODD[i]), b"odd")


def links(folder: str, which: list[int]) -> None:
    os.makedirs(_path(folder, "links"), exist_ok=True)
    for i in which:
        name, target = LINKS[i]
        os.symlink(os.fsencode(target), _path(folder, "links", name))


def bomb(folder: str, depth: int) -> None:
    """Folders each with two links to the next one: 2 ** depth paths."""
    for i in range(depth):
        os.makedirs(_path(folder, "bomb", f"{i}"), exist_ok=True)
        for name in ("a", "b"):
            os.symlink(f"../{i + 1}", _path(folder, "bomb", f"{i}", name))
    os.makedirs(_path(folder, "bomb", f"{depth}"))
    if depth < 10:  # else a file would be uploaded a thousand times over
        _write(_path(folder, "bomb", f"{depth}", "file"), b"x")


def chain(folder: str, length: int) -> None:
    """Links that lead to links."""
    os.makedirs(_path(folder, "chain"), exist_ok=True)
    _write(_path(folder, "chain", "0"), b"end")
    for i in range(1, length):
        os.symlink(f"{i - 1}", _path(folder, "chain", f"{i}"))


def deep(folder: str, levels: int, name: str) -> None:
    here = os.getcwd()
    os.chdir(_path(folder))
    try:
        for level in range(levels):
            os.makedirs(name, exist_ok=True)
            os.chdir(name)
            if level in (5, levels - 1):
                _write(b"./leaf", b"leaf")
    finally:
        os.chdir(here)


def fifo(folder: str, name: str) -> None:
    os.mkfifo(_path(folder, name))


def sock(folder: str) -> None:
    here = os.getcwd()
    os.chdir(_path(folder))
    try:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("socket")
        listener.listen()
        HELD.append(listener)
    finally:
        os.chdir(here)


def device(folder: str, major: int, minor: int) -> None:
    os.mknod(_path(folder, f"device-{minor}"), stat.S_IFCHR | 0o666, os.makedev(major, minor))


def sparse(folder: str, size: int) -> None:
    with open(_path(folder, "sparse"), "wb") as file:
        file.truncate(size)


def locked(folder: str, what: str) -> None:
    """Make a file or folder that even its owner may not read."""
    os.makedirs(_path(folder, "locked"), exist_ok=True)
    _write(_path(folder, "locked", "file"), b"secret")
    os.chmod(_path(folder, "locked", "file") if what == "file" else _path(folder, "locked"), 0)


def immutable(folder: str, what: str) -> None:
    """A file or folder with chattr +i, or a file with +a."""
    _write(_path(folder, "immutable", "file"), b"stays")
    target = _path(folder, "immutable") if what == "folder" else _path(folder, "immutable", "file")
    subprocess.run(
        ["chattr", "+a" if what == "append" else "+i", target],
        check=True,
        stderr=subprocess.DEVNULL,
    )


def failure(kind: str) -> None:
    path = _path("output", "failure")
    if kind == "text":
        _write(path, b"hostile text\nsecond line")
    elif kind == "binary":
        _write(path, bytes(range(256)) * 20)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        os.mkdir(path)
    elif kind == "passwd":
        os.symlink("/etc/passwd", path)
    elif kind == "circle":
        os.symlink("failure", path)
    elif kind == "zero":
        os.symlink("/dev/zero", path)
    elif kind == "nuls":
        with _opened(path) as file:
            file.truncate(2 << 30)
    elif kind == "spaces":
        _write(path, b" " * (4 << 20))
    elif kind == "locked":
        _write(path, b"locked text")
        os.chmod(path, 0)


def flood(kind: str, size: int) -> None:
    made: dict[str, Callable[[], bytes]] = {
        "one line": lambda: b"x" * size,
        "binary": lambda: random.Random(size).randbytes(size),
        "nul": lambda: b"\0" * size,
        "surrogates": lambda: b"\xed\xa0\x80 \xed\xbf\xbf \xff\xfe" * (size // 10),
        "returns": lambda: b"50%\r" * (size // 4),
        "ansi": lambda: b"\x1b[31m\x1b]0;title\x07\x1b[2J" * (size // 20),
        "lines": lambda: b"short\n" * (size // 60),
        "empty lines": lambda: b"\n" * (size // 100),
        "crlf": lambda: b"line\r\n" * (size // 100),
        "separators": lambda: "\u2028\u2029\x85\x0b\x0c\x1c".encode() * (size // 20),
        "json": lambda: b'{"a": [' * (size // 20),
        "wide": lambda: "\U0001f600".encode() * (size // 4),
    }
    _say(made[kind]() + b"\n")


def metrics(which: list[int]) -> None:
    for i in which:
        _say(f"loss={NUMBERS[i]} acc= x=\n".encode("utf-8", "surrogatepass"))


def backtracking() -> None:
    _say(BAIT.encode() + b"\n")


def digits(size: int) -> None:
    _say(b"7" * size + b"\n")


def daemons(count: int, way: str) -> None:
    """Start processes that try to outlive the job."""
    for _ in range(count):
        if os.fork():
            continue
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if way == "writes":
            with contextlib.suppress(OSError):
                for _ in range(3000):
                    os.write(1, b"daemon\n")
                    time.sleep(0.1)
        elif way == "closes":
            os.closerange(0, 64)
        elif (
            way == "strips" and ROOT == "/opt/ml"
        ):  # else nothing could find it, which docs/reliability.md says
            os.execve(
                sys.executable, ["python3", "-c", "import time; time.sleep(300)", sys.argv[2]], {}
            )
        elif way == "forks":
            for _ in range(200):
                if os.fork():
                    os._exit(0)
                time.sleep(0.02)
        time.sleep(300)
        os._exit(0)


def deaf() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def quiet() -> None:
    """Close standard output and error, as daemons do."""
    global _closed
    _closed = True
    os.close(1)
    os.close(2)


def replaced(folder: str, kind: str) -> None:
    """Replace a folder by something else."""
    path = _path(folder)
    os.rename(path, _path("code", f"old-{folder.replace('/', '-')}-{time.time_ns()}"))
    if kind == "file":
        _write(path, b"no folder")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "root":
        os.symlink("/", path)
    elif kind == "etc":
        os.symlink("/etc", path)
    elif kind == "circle":
        os.symlink(os.path.basename(folder), path)
    elif kind == "checkpoints":
        os.symlink("/opt/ml/checkpoints", path)
    elif kind == "config":
        os.symlink("/opt/ml/input/config", path)


def churn(folder: str, seconds: float) -> None:
    """Make, rename, link, and delete until the time is up."""
    chance, until, base = random.Random(seconds), time.monotonic() + seconds, _path(folder, "churn")
    os.makedirs(base, exist_ok=True)
    while time.monotonic() < until:
        one, two = (os.path.join(base, b"%d" % chance.randrange(8)) for _ in range(2))
        with contextlib.suppress(OSError):
            chance.choice(
                [
                    lambda a, b: _write(a, b"x" * chance.randrange(5000)),
                    os.rename,
                    os.link,
                    os.symlink,
                    lambda a, b: os.unlink(a),
                    lambda a, b: os.mkdir(a),
                    lambda a, b: os.rmdir(a),
                    lambda a, b: os.symlink("/etc", a),
                    lambda a, b: _write(os.path.join(a, b"in"), b"y"),
                ]
            )(one, two)
        time.sleep(0.001)


def swap(folder: str, seconds: float) -> None:
    """A folder with a file `passwd`, which is a link to /etc at every other moment."""
    base, until = _path(folder, "swap"), time.monotonic() + seconds
    _write(os.path.join(base, b"real", b"passwd"), b"ours")
    os.symlink("/etc", os.path.join(base, b"link"))
    pairs = [(b"real", b"now"), (b"now", b"real"), (b"link", b"now"), (b"now", b"link")]

    def turn() -> None:
        while time.monotonic() < until:
            for one, two in pairs:
                os.rename(os.path.join(base, one), os.path.join(base, two))
                time.sleep(0.0005)

    threading.Thread(target=turn, daemon=True).start()


def growing(folder: str) -> None:
    """A file that grows as long as the job runs."""

    def grow() -> None:
        with open(_path(folder, "growing"), "wb", buffering=0) as file:
            for _ in range(2000):
                file.write(b"x" * 1000)
                time.sleep(0.01)

    threading.Thread(target=grow, daemon=True).start()


def config(kind: str) -> None:
    """Damage the folders of the control plane."""
    if kind == "truncate":
        for name in os.listdir(_path("input", "config")):
            _write(_path("input", "config", name), b"")
    elif kind == "remove":
        subprocess.run(["rm", "-rf", _path("input")], check=False, stderr=subprocess.DEVNULL)
    elif kind == "tmp":
        subprocess.run(
            ["rm", "-rf", _path(".tmp"), _path("code")], check=False, stderr=subprocess.DEVNULL
        )
    elif kind == "locked":
        os.chmod(_path("input"), 0)


def _some(chance: random.Random, of: int, most: int) -> list[int]:
    return sorted(chance.sample(range(of), chance.randrange(1, min(of, most) + 1)))


Maker = Callable[[random.Random], dict[str, Any]]
FAMILIES: dict[str, tuple[Maker, Callable[..., None]]] = {
    "names": (lambda c: {"folder": _folder(c), "which": _some(c, len(FINE), 8), "odd": []}, names),
    "odd": (
        lambda c: {
            "folder": _folder(c),
            "which": _some(c, len(FINE), 3),
            "odd": _some(c, len(ODD), 3),
        },
        names,
    ),
    "links": (lambda c: {"folder": _folder(c), "which": _some(c, len(LINKS), 5)}, links),
    "bomb": (lambda c: {"folder": _folder(c), "depth": c.choice([6, 24])}, bomb),
    "chain": (lambda c: {"folder": _folder(c), "length": c.choice([5, 45, 300])}, chain),
    "deep": (
        lambda c: {
            "folder": _folder(c),
            "levels": c.choice([500, 1100, 3000]),
            "name": c.choice(["d", "dd", "d" * 20]),
        },
        deep,
    ),
    "fifo": (
        lambda c: {
            "folder": _folder(c),
            "name": c.choice(["fifo", "config.json", "manifest.json"]),
        },
        fifo,
    ),
    "socket": (lambda c: {"folder": _folder(c)}, sock),
    "device": (
        lambda c: {"folder": _folder(c), "major": 1, "minor": c.choice([3, 5, 7, 9])},
        device,
    ),
    "sparse": (
        lambda c: c.choice(
            [
                {"folder": _folder(c), "size": 16 << 20},
                {"folder": c.choice(["output", "code", "output/intermediate"]), "size": 1 << 40},
            ]
        ),
        sparse,
    ),
    "huge": (lambda c: {"folder": c.choice(UPLOADED), "size": 1 << 40}, sparse),
    "locked": (lambda c: {"folder": _folder(c), "what": c.choice(["file", "folder"])}, locked),
    "immutable": (
        lambda c: {"folder": _folder(c), "what": c.choice(["file", "folder", "append"])},
        immutable,
    ),
    "failure": (
        lambda c: {
            "kind": c.choice(
                [
                    "text",
                    "binary",
                    "fifo",
                    "folder",
                    "passwd",
                    "circle",
                    "zero",
                    "nuls",
                    "spaces",
                    "locked",
                ]
            )
        },
        failure,
    ),
    "flood": (
        lambda c: {
            "kind": c.choice(
                [
                    "one line",
                    "binary",
                    "nul",
                    "surrogates",
                    "returns",
                    "ansi",
                    "lines",
                    "empty lines",
                    "crlf",
                    "separators",
                    "json",
                    "wide",
                ]
            ),
            "size": c.choice([1000, 300_000, 1 << 20, 4 << 20]),
        },
        flood,
    ),
    "metrics": (lambda c: {"which": _some(c, len(NUMBERS), 8)}, metrics),
    "backtracking": (lambda c: {}, backtracking),
    "digits": (lambda c: {"size": c.choice([1000, 100_000])}, digits),
    "daemons": (
        lambda c: {
            "count": c.randrange(1, 5),
            "way": c.choice(["sleeps", "writes", "closes", "strips", "forks"]),
        },
        daemons,
    ),
    "deaf": (lambda c: {}, deaf),
    "quiet": (lambda c: {}, quiet),
    "replaced": (
        lambda c: {
            "folder": c.choice(["model", "output/data", "output"]),
            "kind": c.choice(
                ["file", "fifo", "root", "etc", "circle", "checkpoints", "config", "nothing"]
            ),
        },
        replaced,
    ),
    "churn": (lambda c: {"folder": c.choice(UPLOADED), "seconds": c.choice([0.3, 1.2])}, churn),
    "swap": (lambda c: {"folder": c.choice(UPLOADED), "seconds": 1.5}, swap),
    "growing": (lambda c: {"folder": _folder(c)}, growing),
    "config": (lambda c: {"kind": c.choice(["truncate", "remove", "tmp", "locked"])}, config),
}
WEIGHTS = {
    "names": 1.5,
    "metrics": 2.0,
    "flood": 1.5,
    "failure": 1.5,
    "huge": 0.03,
    "backtracking": 0.5,
    "digits": 0.4,
    "bomb": 0.5,
    "churn": 0.6,
    "swap": 0.6,
    "deaf": 0.5,
    "quiet": 0.4,
    "config": 0.5,
}
HELD: list[Any] = []
_closed = False


def _say(text: bytes) -> None:
    if _closed:
        return
    while text:
        text = text[os.write(1, text) :]


def marks_of(plan: Plan) -> list[str]:
    """The lines that the log of a job must have, if it gets there, in this order, each once."""
    marks = ["good files are written"]
    for number, (name, _) in enumerate(plan.steps):
        if name == "quiet":
            return marks
        marks.append(f"mark {number} good={number}")
    return [*marks, f"last words good={len(plan.steps)}"]


def hostile(plan: Plan) -> None:
    """Take all steps, then end as planned."""
    for path, body in good_files(plan.seed).items():
        _write(_path(path), body)
    _say(b"good files are written\n")
    for number, (name, args) in enumerate(plan.steps):
        try:
            FAMILIES[name][1](**args)
        except Exception as error:
            _say(f"step {number}: {error!r}\n".encode("ascii", "backslashreplace"))
        _say(f"mark {number} good={number}\n".encode())
    time.sleep(plan.pause)
    _say(f"last words good={len(plan.steps)}\n".encode())
    how, what = plan.end
    if how == "signal":
        # Process 1 of a namespace takes no signal that it has no handler for, so there is an exit
        # after it.
        number = getattr(signal, what)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        time.sleep(0.2)
        os._exit(99)
    while how == "sleep":
        time.sleep(1)
    os._exit(what)


def neighbour_lines() -> list[str]:
    """The log of a well-behaved job, which runs next to a hostile one."""
    return [f"line {i} loss={1 / (i + 1):.6f} good={i}" for i in range(LINES)]


def neighbour(job: str) -> None:
    """Behave well for a second."""
    for path, body in good_files(job).items():
        _write(_path(path), body)
    for i, line in enumerate(neighbour_lines()):
        _say(line.encode() + b"\n")
        if i % 20 == 0:
            time.sleep(0.1)


def main() -> None:
    if sys.argv[1] == "neighbour":
        neighbour(sys.argv[2])
        return
    plan = plan_of(int(sys.argv[1]), sys.argv[3:])
    with open(_path("input", "config", "resourceconfig.json")) as file:
        host = json.load(file)["current_host"]
    if host != "algo-1":
        _say(b"second host\n")
        return
    hostile(plan)


if __name__ == "__main__":
    main()
