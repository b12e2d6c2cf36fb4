"""The control plane uses and replaces the names in testing/moto_names.py, and the installed moto
has them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moto.s3.responses import S3Response

import smtrain.plane.server as package
from smtrain.plane.client import ACCOUNT
from smtrain.plane.server.serve import MOTO_RELEASES, moto_fault
from smtrain.plane.server.store import _unchunk_body
from testing.moto_names import ADDED_NAMES, CALLS, OBJECTS, REPLACED_NAMES, USED

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
SOURCES = sorted(Path(package.__file__).parent.glob("*.py"))


def uses(path: Path) -> Iterator[str]:
    """`module:name` of each use of moto in a file."""
    tree = ast.parse(path.read_text())
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        assert not (
            isinstance(node, ast.Import) and any(a.name.split(".")[0] == "moto" for a in node.names)
        ), path
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "moto":
            continue
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            if any(key.startswith(f"{full}:") for key in USED):
                modules[alias.asname or alias.name] = full
            else:
                yield f"{node.module}:{alias.name}"
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
        ):
            yield f"{modules[node.value.id]}:{node.attr}"


def test_the_control_plane_uses_no_name_of_moto_beyond_the_list() -> None:
    names = {name for path in SOURCES for name in uses(path)}
    assert names == USED.keys()


def test_the_installed_moto_has_every_name_and_parameter() -> None:
    for key, attributes in USED.items():
        value = named(key)
        for attribute in attributes:
            assert hasattr(value, attribute), f"{key} has no {attribute}"
    for key, parameters in REPLACED_NAMES.items():
        if key in ADDED_NAMES:
            assert not hasattr(named(key.rpartition(".")[0]), key.rpartition(".")[2]), (
                f"moto has {key} by now"
            )
        elif parameters is None:
            assert class_attribute(key) is not None, key
        else:
            assert (
                tuple(inspect.signature(named(key)).parameters)[: len(parameters)] == parameters
            ), key
    for key, parameters in CALLS.items():
        assert set(parameters) <= inspect.signature(named(key)).parameters.keys(), key


@given(st.lists(st.binary(min_size=1, max_size=40)), st.booleans())
def test_a_body_in_chunks_is_what_moto_makes_of_it(chunks: list[bytes], stream: bool) -> None:
    parts = [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]
    body = b"".join([*parts, b"0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n"])
    decoders: list[Any] = [_unchunk_body, S3Response._handle_encoded_body]
    ours, theirs = (decode(None, BytesIO(body) if stream else body) for decode in decoders)
    assert ours == theirs == b"".join(chunks)
    assert _unchunk_body(None, b"") == b""


def test_moto_is_one_of_the_releases_that_are_declared() -> None:
    assert moto_fault() == ""
    [declared] = re.findall(r'"(moto\[server\].*?)"', PROJECT.read_text())
    first, below = (".".join(map(str, release)) for release in MOTO_RELEASES)
    assert f">={first}" in declared
    assert f"<{below}" in declared


@pytest.mark.parametrize("other", ["5.2.4", "5.3.0", "6.0"])
def test_another_moto_is_a_sentence(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: other)
    assert (
        moto_fault()
        == f"the local control plane needs moto>=5.2.5,<5.3 and moto {other} is installed; pip"
        " install 'moto>=5.2.5,<5.3'"
    )


def test_what_is_replaced_is_what_the_list_says(tmp_path: Path) -> None:
    # A separate process: moto is changed for good.
    program = (
        "import sys; from tests.plane.test_moto_contract import replaced; replaced(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1])) == REPLACED_NAMES.keys()


def named(key: str) -> Any:
    module, _, path = key.partition(":")
    value: Any = importlib.import_module(module)
    for name in path.split("."):
        value = getattr(value, name)
    return value


def class_attribute(key: str) -> Any:
    """The attribute of a class or its bases, not of an instance."""
    owner, _, name = key.rpartition(".")
    return next((vars(kind)[name] for kind in named(owner).__mro__ if name in vars(kind)), None)


def motos() -> dict[str, Any]:
    """Everything that moto's modules and classes have, by `module:name` and `module:Class.name`."""
    methods: dict[str, Any] = {}
    for module in [
        m
        for name, m in sys.modules.items()
        if name.split(".")[0] == "moto" and isinstance(m, ModuleType)
    ]:
        for name, value in vars(module).items():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                methods |= {
                    f"{module.__name__}:{name}.{key}": held for key, held in vars(value).items()
                }
            else:
                methods[f"{module.__name__}:{name}"] = value
    return methods


def replaced(folder: str) -> None:
    """Install the control plane's parts as its server does; print what changed in moto, and hold
    its objects.
    """
    from moto.cloudwatch.models import cloudwatch_backends
    from moto.iam.models import iam_backends
    from moto.logs.models import logs_backends
    from moto.s3.models import FakeMultipart, s3_backends
    from moto.sagemaker.models import sagemaker_backends

    from smtrain.plane.client import BUCKET, REGION, ROLE, Endpoint
    from smtrain.plane.server import (
        logs_api,
        quotas,
        schedules,
        serve,
        simulator,
        store,
        training_api,
    )
    from smtrain.plane.server.executor import Executor
    from smtrain.plane.server.index import VERSION_ATTRIBUTES

    endpoint = Endpoint(
        "http://127.0.0.1:9", REGION, ACCOUNT, BUCKET, ROLE, Path(folder), 1, "id", "key"
    )
    # Made before the first look: moto fills such things in as they are asked for.
    backends: list[Any] = [
        each[ACCOUNT][REGION] for each in (cloudwatch_backends, logs_backends, sagemaker_backends)
    ]
    s3 = s3_backends[ACCOUNT]["aws"]
    iam = iam_backends[ACCOUNT]["aws"]
    role = iam.create_role("role", "{}", "/", None, "", [], "3600")
    backends += [s3, iam, role]
    (Path(folder) / "local").mkdir()
    before = motos()
    serve.list_services_once()
    store.install(Path(folder) / "s3")
    training_api.install(Executor(endpoint, grace=1, namespaces=False))
    logs_api.install()
    simulator.install()
    schedules.install()
    quotas.install(quotas.Quotas())
    after = motos()
    changed = [key for key in after if key not in before or after[key] is not before[key]]

    s3.create_bucket(BUCKET, REGION)
    s3.put_bucket_versioning(BUCKET, "Enabled")
    key = s3.put_object(BUCKET, "a/b", b"body")
    marker, _ = s3.delete_object(BUCKET, "a/b")
    assert marker
    stream = logs_api.stream_of("job/algo-1-1")
    objects = [*backends, key, s3.buckets[BUCKET], s3.buckets[BUCKET].keys["a/b"], stream.log_group]
    objects.append(FakeMultipart("a", {}, ACCOUNT, REGION))  # type: ignore[arg-type]
    for wanted, attributes in OBJECTS.items():
        [instance] = [each for each in objects if type(each).__name__ == wanted]
        for attribute in (*attributes, *(VERSION_ATTRIBUTES if wanted == "FakeKey" else ())):
            assert hasattr(instance, attribute), f"{wanted} has no {attribute}"
    print(json.dumps([key for key in changed if not key.startswith("moto.core.")]))
