"""Each bad state of a machine is a line with its remedy: tools that fail or hang, broken packages,
full disks.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import resource
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smtrain.client.findings import Finding
from smtrain.core import machine as core_machine
from smtrain.core.machine import memory_here, memory_limit_here
from smtrain.tools.doctor import devices, doctor_report, software, torch_probe
from smtrain.tools.doctor.devices import TorchView
from smtrain.tools.doctor.doctor_report import Diagnostics, anonymise, ask
from tests.typed import typed

Put = Callable[[str, str], Path]
CPU_TORCH: dict[str, Any] = {
    "torch": "2.13.0+cpu",
    "cuda": None,
    "hip": None,
    "accelerator": None,
    "count": 0,
    "devices": [],
    "warnings": [],
}
CUDA_TORCH = CPU_TORCH | {"torch": "2.13.0+cu130", "cuda": "13.0"}
NVIDIA_SMI = "| NVIDIA-SMI 580.65  Driver Version: 580.65  CUDA Version: 13.0 |"


def written(file: Path, text: str) -> Path:
    """The file, with this text, below folders that are made if they are missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """An empty /dev, /proc and /sys; the fixture puts a file into it."""
    root = tmp_path / "system"
    root.mkdir()
    for module in (doctor_report, software, devices):
        monkeypatch.setattr(module, "SYSTEM", root)
    return lambda name, text: written(root / name, text)


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """A folder on PATH; the fixture puts a program into it."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def put(name: str, script: str) -> Path:
        file = written(folder / name, f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        return file

    return put


@pytest.fixture
def shadow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """A folder that comes first on the path of Pythons that are started; the fixture puts a module
    into it.
    """
    folder = tmp_path / "shadow"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    return lambda name, text: written(folder / name, textwrap.dedent(text))


def seen(monkeypatch: pytest.MonkeyPatch, view: dict[str, Any], shadow: Put) -> list[Finding]:
    """Findings about the devices, with a torch that says this; it is printed by a program in
    torch's place.
    """
    line = f"\n{torch_probe.MARK}{json.dumps(view)}"
    shadow(
        "torch/__init__.py",
        f"import sys\nprint({line!r})\nsys.stdout.flush()\nimport os; os._exit(0)\n",
    )
    found = Diagnostics()
    devices.devices(found)
    return found.findings


def told(found: list[Finding] | Diagnostics, level: str) -> list[str]:
    rows = found.findings if isinstance(found, Diagnostics) else found
    return [f"{one.check}: {one.text} -> {one.remedy}" for one in rows if one.level == level]


def test_this_machine_has_no_fault_and_the_report_names_no_one(tmp_path: Path) -> None:
    file, page = tmp_path / "doctor.json", tmp_path / "doctor.html"
    done = typed(
        "doctor",
        "--json",
        str(file),
        "--page",
        str(page),
        HF_TOKEN="hf_" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3z",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(file.read_text())
    assert written["ok"]
    assert written["format"] == 1
    assert written["machine"]["packages"]["torch"] == software._version("torch")
    assert written["training"] is None
    machine = page.read_text().partition("<h2>Machine</h2>")[2]
    assert machine.count("<table") == 1, "values begin at one place"
    assert machine.count('<th colspan="2"') == len(written["machine"])
    for text in (done.stdout, file.read_text(), page.read_text()):
        assert socket.gethostname() not in text
        assert str(Path.home()) == "/" or f"{Path.home()}/" not in text
        assert sys.prefix not in text
        assert "hf_aB3" not in text


def test_json_is_printed_and_only_reports_of_its_own_are_replaced(
    shadow: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow("torch/__init__.py", "import os; os._exit(3)")  # to be quick
    monkeypatch.chdir(tmp_path)
    done = typed("doctor", "--json", "-")
    printed = json.loads(done.stdout)
    assert (done.returncode, printed["ok"], printed["made_by"]) == (2, False, "smtrain doctor")
    assert {row["level"] for row in printed["findings"]} <= {"ok", "warning", "fault"}
    assert all(row["remedy"] for row in printed["findings"] if row["level"] != "ok")
    for name in ("x.json", "x.html"):
        option = f"--{'json' if name.endswith('json') else 'page'}"
        Path(name).write_text("mine: smtrain doctor")
        refused = typed("doctor", option, name)
        assert f"{option}: {name} exists and is no report of smtrain doctor" in refused.stderr
        assert Path(name).read_text() == "mine: smtrain doctor"
        assert typed("doctor", option, name, "--overwrite").stderr == ""
        assert typed("doctor", option, name).stderr == ""
    assert (
        "--page and --json are the same file"
        in typed("doctor", "--json", "x", "--page", "./x").stderr
    )


@pytest.mark.parametrize(
    ("module", "text", "said"),
    [
        (
            "torch/__init__.py",
            "raise OSError('libcudart.so.13: cannot open shared object file')",
            "libcudart.so.13",
        ),
        ("torch/__init__.py", "import os; os.abort()", "was killed by signal 6"),
        (
            "transformers/__init__.py",
            "raise ImportError('needs another torch')",
            "transformers is installed, but",
        ),
    ],
)
def test_a_package_that_cannot_be_imported(shadow: Put, module: str, text: str, said: str) -> None:
    shadow(module, text)
    done = typed("doctor")
    assert done.returncode == 2
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("fault")]
    assert said in line
    assert "1 fault," in done.stdout


def test_a_torch_whose_import_hangs_is_ended(shadow: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow("torch/__init__.py", "import time; time.sleep(1000)")
    monkeypatch.setattr(devices, "IMPORT", 1.0)
    found = Diagnostics()
    assert devices.devices(found).report == {}
    (line,) = told(found, "fault")
    assert line.startswith(
        "torch: torch is installed, but `import torch` does not answer within 1 s -> a driver may"
        " hang"
    )


def test_no_torch_is_said_with_the_command_that_installs_it(shadow: Put, tmp_path: Path) -> None:
    """As in an environment without it: this smtrain and its base packages, and nothing else."""
    blocker = (
        "import sys\nclass No:\n    def find_spec(self, name, *_):\n        if"
        " name.split('.')[0] in"
    )
    blocker += " ('torch', 'transformers'): raise ModuleNotFoundError(name=name)\n"
    blocker += (
        "    def find_distributions(self, context): return []\nsys.meta_path.insert(0, No())\n"
    )
    blocker += "import importlib.metadata as m\nreal = m.distribution\n"
    blocker += (
        "def only(name):\n    if name in ('torch', 'transformers'): raise"
        " m.PackageNotFoundError(name)\n"
    )
    blocker += (
        "    return real(name)\nm.distribution = only\nm.version = lambda name:"
        " only(name).version\n"
    )
    shadow("sitecustomize.py", blocker)
    command = [sys.executable, "-m", "smtrain", "doctor", "--train"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    faults = [line for line in done.stdout.splitlines() if line.startswith("fault")]
    assert [line.split("packages")[1].strip() for line in faults] == [
        "torch is not installed",
        "transformers is not installed",
    ]
    assert "-> run `pip install " in done.stdout
    assert "nothing was trained, as a fault prevents it" in done.stdout


def packages(monkeypatch: pytest.MonkeyPatch, folder: Path, **versions: str) -> Diagnostics:
    """`software` in an environment whose records of installation say this."""
    for name, version in versions.items():
        record = folder / f"{name}-{version}.dist-info"
        record.mkdir()
        more = "Requires-Python: >=3.99\n" if name == "smtrain" else ""
        more += (
            'Provides-Extra: train\nRequires-Dist: torch>=2.9; extra == "train"\n'
            if name == "smtrain"
            else ""
        )
        (record / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}"
        )
    monkeypatch.syspath_prepend(str(folder))
    found = Diagnostics()
    software.software(found)
    return found


def test_a_checkout_that_is_not_installed_is_told_which_packages_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The packages of an extra are then unknown; the remedy was `pip install`, without any."""
    monkeypatch.setattr("smtrain.core.extras._packages", lambda extra: [])
    monkeypatch.setattr(software, "_lowest_versions", lambda: {"torch": "2.9", "gigatoken": "0.10"})
    real = software._version
    monkeypatch.setattr(
        software, "_version", lambda name: None if name == "gigatoken" else real(name)
    )
    software.software(found := Diagnostics())
    (line,) = (one for one in told(found, "warning") if "gigatoken" in one)
    assert "run `pip install gigatoken`" in line


def test_versions_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = packages(monkeypatch, tmp_path, torch="2.13.0", torch_neuronx="2.14.3.0")
    (line,) = told(found, "fault")
    assert "torch-neuronx 2.14.3.0 is built for torch 2.14, and torch 2.13.0 is installed" in line
    assert "pip install 'torch==2.14.*'" in line


def test_versions_that_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert (
        told(packages(monkeypatch, tmp_path, torch="2.14.1", torch_neuronx="2.14.3.0"), "fault")
        == []
    )


def test_an_old_torch_and_another_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = packages(monkeypatch, tmp_path, torch="2.4.1", smtrain="9.9")
    python, torch = told(found, "fault")
    assert "is not one that smtrain runs on" in python
    assert ">=3.99" in python
    assert "torch 2.4.1 is too old; smtrain needs 2.9" in torch


# Disks and memory


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], check=False
    ).returncode:
        pytest.skip("needs to mount a small disk (root, and a kernel that lets it)")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_prevents_training_if_jobs_write_there(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMTRAIN_HOME", str(small / "home"))
    found = Diagnostics()
    software.disks(found, 0)
    (line,) = told(found, "fault")
    assert line.startswith(
        "disk: 0.00 GiB are free in SMTRAIN_HOME: the disk is full -> free some (`smtrain local"
        " clean`"
    )
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    found = Diagnostics()
    software.disks(found, 0)
    assert "SMTRAIN_HOME cannot be written to: read-only file system" in told(found, "fault")[0]
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path))
    monkeypatch.chdir(small)
    found = Diagnostics()
    software.disks(found, 0)
    assert told(found, "fault") == []
    assert "the working folder cannot be written to" in " ".join(told(found, "warning"))


def test_small_and_full_shared_memory(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "SYSTEM", small.parent / "system")
    (small.parent / "system/dev").mkdir(parents=True)
    (small.parent / "system/dev/shm").symlink_to(small)
    for count, level in ((1, "warning"), (8, "fault")):
        found = Diagnostics()
        software._check_shared_memory(found, count)
        (line,) = told(found, level)
        assert "/dev/shm" in line
        assert "--shm-size=8g" in line


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"memory.max": "max", "memory.current": "5", "memory.stat": ""}, None),
        (
            {
                "memory.max": f"{2**29}",
                "memory.current": f"{2**28}",
                "memory.stat": f"inactive_file {2**26}",
            },
            2**29,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "1",
                "memory/memory.stat": "",
            },
            None,
        ),
        (
            {
                "memory/memory.limit_in_bytes": f"{2**29}",
                "memory/memory.usage_in_bytes": f"{2**28}",
                "memory/memory.stat": f"total_inactive_file {2**26}",
            },
            2**29,
        ),
    ],
    ids=["version 2, no limit", "version 2", "version 1, no limit", "version 1"],
)
def test_the_memory_of_a_container(
    files: dict[str, str], limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(core_machine, "CGROUP", tmp_path)
    assert memory_limit_here() == limit
    free = memory_here()
    assert free is not None
    assert (free == 2**28 + 2**26) == (limit is not None)
    found = Diagnostics()
    software.processor(found, 1)
    assert any(
        "0.3 GiB of memory are free of the 0.5 GiB" in line for line in told(found, "fault")
    ) == (limit is not None)


def test_limits_of_the_shell_and_the_quota_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr(software, "CGROUP", tmp_path)
    real = resource.getrlimit
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda one: (
            (100, 100) if one in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS) else real(one)
        ),
    )
    found = Diagnostics()
    software.processor(found, 1)
    text = " ".join(told(found, "warning"))
    assert "this container may use 0.5 of the" in text
    assert "OMP_NUM_THREADS=1" in text
    assert "`ulimit -n 4096`" in text
    assert "`ulimit -v unlimited`" in text


# Drivers and devices


@pytest.mark.parametrize(
    ("script", "level", "said"),
    [
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch' >&2; exit 18",
            "fault",
            "version mismatch",
        ),
        ("sleep 100", "fault", "does not answer within 1 s -> reboot"),
        ("kill -SEGV $$", "fault", "was killed by signal 11"),
    ],
)
def test_a_broken_nvidia_driver(
    system: Put,
    tool: Put,
    script: str,
    level: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    shadow: Put,
) -> None:
    monkeypatch.setattr(doctor_report, "PATIENCE", 1.0)
    system("dev/nvidia0", "")
    tool("nvidia-smi", script)
    (line,) = told(seen(monkeypatch, CUDA_TORCH, shadow), level)
    assert line.startswith("driver: nvidia-smi is there, but ")
    assert said in line


def smi(rows: str, newest: str = NVIDIA_SMI) -> str:
    return f"case \"$*\" in *query-gpu*) echo '{rows}';; *) echo '{newest}';; esac"


GOOD = "0, NVIDIA H100 80GB HBM3, 580.65, 81559, 4, Default"


@pytest.mark.parametrize(
    ("rows", "newest", "view", "level", "said"),
    [
        (
            GOOD,
            NVIDIA_SMI.replace("13.0", "12.4"),
            CUDA_TORCH,
            "fault",
            "too old: it is for CUDA 12.4, and torch",
        ),
        (
            GOOD,
            NVIDIA_SMI,
            CPU_TORCH,
            "fault",
            "it is the build for CPUs -> install torch with the command",
        ),
        (
            GOOD,
            NVIDIA_SMI,
            CUDA_TORCH
            | {"error": "The NVIDIA driver on your system is too old (found version 11040)."},
            "fault",
            "torch 2.13.0+cu130 sees none: The NVIDIA driver on your system is too old",
        ),
        (
            GOOD,
            NVIDIA_SMI,
            CUDA_TORCH | {"hip": "6.4", "cuda": None},
            "fault",
            "the build for another maker's GPUs",
        ),
        (
            GOOD.replace("4, Default", "9000, Default"),
            NVIDIA_SMI,
            None,
            "warning",
            "GPU 0 is busy: 9000 of 81559 MiB",
        ),
        (GOOD.replace("4, Default", "80000, Default"), NVIDIA_SMI, None, "fault", "GPU 0 is busy"),
        (
            GOOD.replace("Default", "Prohibited"),
            NVIDIA_SMI,
            None,
            "fault",
            "nvidia-smi -i 0 -c DEFAULT",
        ),
    ],
)
def test_what_nvidia_smi_and_torch_say(
    rows: str,
    newest: str,
    view: dict[str, Any] | None,
    level: str,
    said: str,
    system: Put,
    tool: Put,
    shadow: Put,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system("dev/nvidia0", "")
    tool("nvidia-smi", smi(rows, newest))
    works = {
        "index": 0,
        "name": "NVIDIA H100",
        "free": 8 * 10**10,
        "total": 8 * 10**10,
        "works": True,
    }
    view = view or CUDA_TORCH | {"accelerator": "cuda", "count": 1, "devices": [works]}
    lines = told(seen(monkeypatch, view, shadow), level)
    assert len(lines) == 1, lines
    assert said in lines[0]


def test_variables_that_hide_devices_are_named(
    system: Put, tool: Put, shadow: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    system("dev/nvidia0", "")
    tool("nvidia-smi", smi(GOOD))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (
        "CUDA_VISIBLE_DEVICES hides them -> unset"
        in told(seen(monkeypatch, CUDA_TORCH, shadow), "fault")[0]
    )


def test_a_busy_gpu_that_is_not_chosen_is_no_fault(
    system: Put, tool: Put, shadow: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in (0, 1):
        system(f"dev/nvidia{index}", "")
    tool("nvidia-smi", smi(f"{GOOD.replace('4, Default', '80000, Default')}\n1{GOOD[1:]}"))
    works = {"index": 0, "free": 8 * 10**10, "total": 8 * 10**10, "works": True}
    view = CUDA_TORCH | {"accelerator": "cuda", "count": 1, "devices": [works]}
    for chosen, faults in (("1", 0), ("0,1", 1), ("GPU-8f6d", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert len(told(seen(monkeypatch, view, shadow), "fault")) == faults, chosen


def test_a_gpu_without_driver_and_one_that_does_not_compute(
    system: Put, tool: Put, shadow: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    system("sys/bus/pci/devices/0000:00:1e.0/vendor", "0x10de\n")
    system("sys/bus/pci/devices/0000:00:1e.0/class", "0x030200\n")
    (line,) = told(seen(monkeypatch, CUDA_TORCH, shadow), "fault")
    assert "1 NVIDIA GPU is on the PCI bus, and no driver" in line
    system("dev/nvidia0", "")
    tool("nvidia-smi", smi(GOOD))
    broken = {
        "index": 0,
        "works": False,
        "error": "CUDA error: uncorrectable ECC error encountered",
    }
    view = CUDA_TORCH | {"accelerator": "cuda", "count": 1, "devices": [broken]}
    (line,) = told(seen(monkeypatch, view, shadow), "fault")
    assert "cuda:0 does not compute (CUDA error: uncorrectable ECC error" in line


def test_a_torch_for_gpus_on_a_machine_without_one_is_no_fault(
    system: Put, tool: Put, shadow: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = seen(monkeypatch, CUDA_TORCH, shadow)
    assert told(found, "fault") == []
    assert "is built for GPUs, and this machine has none" in told(found, "warning")[0]


LS = [
    {
        "neuron_device": 0,
        "nc_count": 4,
        "logical_neuroncore_config": 2,
        "instance_type": "trn2.3xlarge",
        "memory_size": 103079215104,
        "neuron_processes": [],
    }
]


@pytest.mark.parametrize(
    ("answer", "driver", "version", "view", "level", "said"),
    [
        (
            "exit 1",
            "2.31.7.0",
            "2.14.3.0",
            None,
            "fault",
            "neuron-ls is there, but ends with status 1",
        ),
        (
            "sleep 100",
            "2.31.7.0",
            "2.14.3.0",
            None,
            "fault",
            "does not answer within 1 s -> reboot",
        ),
        (
            None,
            "2.25.4.0",
            "2.14.3.0",
            None,
            "fault",
            "driver 2.25.4.0 is too old for torch-neuronx 2.14.3.0",
        ),
        (
            None,
            "2.31.7.0",
            None,
            CPU_TORCH,
            "fault",
            "installed -> run `pip install 'torch-neuronx==2.13.*'",
        ),
        (None, "2.31.7.0", "2.9.0.2.15", CPU_TORCH, "fault", "is of PyTorch/XLA"),
        (
            "busy",
            "2.31.7.0",
            "2.14.3.0",
            None,
            "fault",
            "1 of 1 Neuron devices are busy (process 4711)",
        ),
        (
            "echo hello",
            "2.31.7.0",
            "2.14.3.0",
            None,
            "warning",
            "neuron-ls answers, but not as known",
        ),
    ],
)
def test_a_neuron_machine(
    answer: str | None,
    driver: str,
    version: str | None,
    view: dict[str, Any] | None,
    level: str,
    said: str,
    system: Put,
    tool: Put,
    shadow: Put,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(doctor_report, "PATIENCE", 1.0)
    system("dev/neuron0", "")
    system("sys/module/neuron/version", driver)
    busy = [{**LS[0], "neuron_processes": [{"pid": 4711, "command": "python train.py"}]}]
    tool(
        "neuron-ls",
        (
            f"echo '{json.dumps(busy if answer == 'busy' else LS)}'"
            if answer in (None, "busy")
            else answer
        ),
    )
    if version:
        record = tmp_path / f"torch_neuronx-{version}.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {version}\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
    works = CPU_TORCH | {
        "accelerator": "neuron",
        "count": 4,
        "devices": [{"index": 0, "works": True}],
    }
    lines = told(seen(monkeypatch, view or works, shadow), level)
    assert len(lines) == 1, lines
    assert said in lines[0]


def test_a_sound_neuron_machine_without_driver(
    system: Put, tool: Put, shadow: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    system("sys/devices/virtual/dmi/id/product_name", "trn2.48xlarge\n")
    (line,) = told(found := seen(monkeypatch, CPU_TORCH, shadow), "fault")
    assert (
        "this machine is a trn2.48xlarge without Neuron devices: no driver is loaded -> run `sudo"
        " modprobe neuron`" in line
    )
    assert any("can have EFA, and none is here" in line for line in told(found, "warning"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user for a while")
def test_devices_that_may_not_be_opened(system: Put) -> None:
    found, file = Diagnostics(), system("dev/neuron0", "")
    file.chmod(stat.S_IRUSR)
    os.setresuid(65534, 0, 0)  # access(2) goes by the real user
    try:
        assert not devices._has_access(found, [file], "Neuron")
    finally:
        os.setresuid(0, 0, 0)
    assert "you may not open Neuron devices (/dev/neuron0)" in told(found, "fault")[0]


@pytest.mark.parametrize(
    ("script", "said"), [("exit 61", "fi_info ends with status 61"), (None, "fi_info is not there")]
)
def test_efa_without_its_software(
    script: str | None,
    said: str,
    system: Put,
    tool: Put,
    shadow: Put,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system("sys/class/infiniband/efa_0/x", "")
    if script:
        tool("fi_info", script)
    found = seen(monkeypatch, CPU_TORCH, shadow)
    assert any(said in line for line in told(found, "warning"))


# Parts


def test_a_program_that_cannot_be_started_or_says_nothing(tool: Put) -> None:
    assert ask("no-such-program").state == "missing"
    tool("silent", "exit 3")
    assert ask("silent").failure_reason() == "ends with status 3"
    broken = tool("broken", "")
    broken.write_text("#!/no/such/interpreter\n")
    assert ask("broken").state == "fails"
    tool("forks", "sleep 100 & echo done")
    assert ask("forks", seconds=10).out == "done\n", "a child that holds the pipe holds nothing up"


def test_names_and_secrets_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "gpu-box-7")
    monkeypatch.setattr(getpass, "getuser", lambda: "annabel")
    monkeypatch.setenv("HOME", "/home/annabel")
    monkeypatch.chdir("/usr")
    text = (
        f"{sys.prefix}/lib: /home/annabel/x on gpu-box-7 by annabel in /usr/lib, /usrlocal,"
        " password=hunter2hunter2"
    )
    assert anonymise(text).startswith(
        "ENVIRONMENT/lib: ~/x on HOST by USER in ./lib, /usrlocal, password=<hidden"
    )


def test_a_view_without_devices_is_a_cpu() -> None:
    assert (TorchView().kind, TorchView().processes) == ("cpu", 1)
