"""The launcher ends a job whose image or host cannot train on its Neuron devices, in one sentence,
before torchrun.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smtrain.core.protocol.entrypoints import entrypoints_folder
from smtrain.plane.client import ACCOUNT
from smtrain.plane.server.executor import arn_of

NATIVE = {"torch": "2.14.0", "torch-neuronx": "2.14.3.0.31415"}
XLA = {"torch": "2.9.0", "torch-neuronx": "2.9.0.2.14.27725", "neuronx-distributed": "0.19.28093"}
DRIVER = "2.31.7.0"

Ended = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Ended]:
    """Run the launcher's train stage on a host with these packages, driver and devices; torchrun is
    left out.

    Gives the exit status (0: training would have begun), the failure file, and the output.
    """
    monkeypatch.syspath_prepend(str(entrypoints_folder()))
    launch: Any = importlib.import_module("launch")
    neuron_host: Any = importlib.import_module("neuron_host")
    ml, root, programs, site = (tmp_path / name for name in ("ml", "root", "bin", "site"))
    for folder in (
        ml / "input/data/config",
        ml / "input/config",
        root / "dev",
        root / "sys/module/neuron",
        programs,
        site,
    ):
        folder.mkdir(parents=True)
    monkeypatch.setattr(neuron_host, "ROOT", root)
    monkeypatch.setattr(launch, "train", lambda *_: 0)
    monkeypatch.setattr(launch, "missing_requirements", lambda _: [])
    monkeypatch.setattr(sys, "argv", ["launch.py", "train"])
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("SMTRAIN_ML_ROOT", str(ml))
    for name in neuron_host.LNC:
        monkeypatch.delenv(name, raising=False)
    hidden = neuron_host.metadata.version

    def version(name: str) -> str:
        """The fake distributions, not those of this environment."""
        for found in neuron_host.metadata.distributions(name=name, path=[str(site)]):
            return str(found.version)
        raise neuron_host.metadata.PackageNotFoundError(name)

    def run(
        packages: dict[str, str],
        *,
        engine: str = "native",
        driver: str | None = DRIVER,
        device: bool = True,
        processes: int = 64,
        lnc: str | None = "2",
        listed: str | None = None,
        arn: str = "",
    ) -> tuple[int, str, str]:
        for name, number in packages.items():
            about = site / f"{name.replace('-', '_')}-{number}.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
            )
        if device:
            (root / "dev/neuron0").touch()
        if driver:
            (root / "sys/module/neuron/version").write_text(f"{driver}\n")
        if listed is not None:
            (programs / "neuron-ls").write_text(f"#!/bin/sh\ncat <<'END'\n{listed}\nEND\n")
            (programs / "neuron-ls").chmod(0o755)
        if lnc:
            monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", lnc)
        kind = "ml.trn1.32xlarge" if engine == "nxd" else "ml.trn2.48xlarge"
        compute = {"processes_per_instance": processes, "instance_type": kind}
        (ml / "input/data/config/config.json").write_text(
            json.dumps({"compute": compute, "train": {"engine": engine}})
        )
        (ml / "input/config/resourceconfig.json").write_text(
            '{"hosts": ["algo-1"], "current_host": "algo-1"}'
        )
        monkeypatch.setattr(neuron_host.metadata, "version", version)
        if arn:
            monkeypatch.delenv("SMTRAIN_ML_ROOT")
            monkeypatch.setenv("TRAINING_JOB_ARN", arn)
            monkeypatch.setattr(launch, "Path", lambda *_: ml)
        with pytest.raises(SystemExit) as left:
            launch.main()
        monkeypatch.setattr(neuron_host.metadata, "version", hidden)
        failure = ml / "output/failure"
        return (
            int(left.value.code or 0),
            failure.read_text() if failure.exists() else "",
            capsys.readouterr().out,
        )

    yield run
    for name in ("launch", "neuron_host"):
        sys.modules.pop(name, None)


def listing(devices: int, ids: int, lnc: int, count: int | None = None) -> str:
    return json.dumps(
        [
            {
                "neuron_device": n,
                "nc_count": count or ids,
                "logical_neuroncore_config": lnc,
                "neuroncore_ids": list(range(n * ids, (n + 1) * ids)),
            }
            for n in range(devices)
        ]
    )


@pytest.mark.parametrize(
    ("packages", "given", "sentence"),
    [
        ({}, {}, "the image has no torch, so it cannot use the Neuron devices"),
        ({"torch": "2.14.0"}, {}, "the image has torch 2.14.0 and no torch-neuronx"),
        (
            XLA,
            {},
            (
                "torch-neuronx 2.9.0.2.14.27725, which is PyTorch/XLA, and engine native needs"
                " TorchNeuron (2.13 or"
            ),
        ),
        (NATIVE, {"engine": "nxd"}, "which is TorchNeuron, and engine nxd needs PyTorch/XLA"),
        (
            {**NATIVE, "torch": "2.13.0+cpu"},
            {},
            "2.13.0+cpu, and torch-neuronx 2.14.3.0.31415 is made for",
        ),
        ({**XLA, "torch": "2.8.0"}, {"engine": "nxd"}, "is made for torch 2.9"),
        (
            {k: v for k, v in XLA.items() if k != "neuronx-distributed"},
            {"engine": "nxd"},
            "has no neuronx-distributed, which engine nxd needs",
        ),
        (
            NATIVE,
            {"driver": "2.26.5.0"},
            "is 2.26.5.0, and the image's runtime refuses drivers up to 2.26; launch",
        ),
        (
            XLA,
            {"engine": "nxd", "driver": "2.22.0", "lnc": None, "processes": 32},
            "drivers up to 2.26; take an",
        ),
        (
            NATIVE,
            {"listed": listing(16, 4, 2), "lnc": "2", "processes": 128},
            "128 processes with LNC 2 need 256",
        ),
        (
            NATIVE,
            {"listed": listing(1, 4, 2), "processes": 64},
            "has 8; set compute.processes_per_instance: 4",
        ),
        (
            NATIVE,
            {"device": False, "arn": arn_of("a").replace(ACCOUNT, "111122223333")},
            "this host of ml.trn2.48xlarge shows no Neuron device",
        ),
    ],
)
def test_a_wrong_combination_is_one_sentence_in_the_failure_reason(
    ended: Ended, packages: dict[str, str], given: dict[str, Any], sentence: str
) -> None:
    status, failure, _ = ended(packages, **given)
    assert status == 1
    assert sentence in failure
    assert "; " in failure, "a remedy"
    assert len(failure) < 1024
    assert "\n" not in failure


@pytest.mark.parametrize(
    ("packages", "given"),
    [
        (NATIVE, {"listed": listing(16, 4, 2)}),
        (NATIVE, {"listed": listing(16, 4, 2, count=8)}),
        (NATIVE, {"listed": listing(16, 8, 1), "lnc": "1", "processes": 128}),
        (NATIVE, {"listed": "no JSON"}),
        (NATIVE, {"listed": "{}", "driver": None}),
        (NATIVE, {"driver": "2.27.1.0"}),
        ({"torch": "2.13.1", "torch-neuronx": "2.13.3.0"}, {}),
        (XLA, {"engine": "nxd", "lnc": None, "processes": 32, "listed": listing(16, 2, 1)}),
        (
            {**XLA, "torch-neuronx": "2.9.0.2.12.22436"},
            {"engine": "nxd", "driver": "2.22.0", "lnc": None},
        ),
    ],
)
def test_a_right_one_trains_and_its_versions_are_in_the_log(
    ended: Ended, packages: dict[str, str], given: dict[str, Any]
) -> None:
    status, failure, told = ended(packages, **given)
    assert (status, failure) == (0, "")
    driver = given.get("driver", DRIVER) or "unknown"
    assert (
        f"neuron: driver {driver}, torch {packages['torch']}, torch-neuronx"
        f" {packages['torch-neuronx']}" in told
    )


@pytest.mark.parametrize("arn", ["", arn_of("a"), arn_of("a", "eu-west-1")])
def test_a_host_without_devices_here_is_no_error(ended: Ended, arn: str) -> None:
    """The control plane, in containers too (they have an ARN and no folder of ours), and Slurm run
    jobs of any instance type on CPUs, with any torch.
    """
    assert ended({"torch": "2.13.0+cpu"}, device=False, arn=arn) == (0, "", "")
