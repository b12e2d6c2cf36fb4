"""A host's use of its machine, from recorded files of a kernel and recorded output of the makers'
tools.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from smtrain.core.protocol.log_lines import MACHINE_NUMBERS, machine_record
from smtrain.worker.train.device_use import DeviceUse, Gpus, neuron, neuron_settings
from smtrain.worker.train.machine_watch import READINGS_PER_LINE, MachineCounters, MachineWatch

STAT = (
    "cpu  {busy} 469490 358816 {idle} 11742 0 12175 32588 0 0\ncpu0 901338 232362 172305 246198"
    " 1739 0 5022 16147 0 0\n"
)
MEMINFO = "MemTotal:       32000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"
NET = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo: {lo} 26774620    0    0    0     0          0         0 {lo} 26774620    0    0    0     0       0          0
docker0: {eth} 26774620    0    0    0     0          0         0 {eth} 26774620    0    0    0     0       0          0
  eth0:{eth} 283302    0    0    0     0          0         0  8646002   89325    0    0    0     0       0          0
"""
DISKS = """   7       0 loop0 0 0 900 0 0 0 900 0 0 0 0 0 0 0 0 0 0
 254       0 vda 978055 117110 {read} 986517 761713 2310346 169973576 1634121 0 508788 2859733
 254       1 vda1 978055 117110 {read} 986517 761713 2310346 169973576 1634121 0 508788 2859733
"""


def machine(root: Path, *, busy: int, idle: int, eth: int, read: int, efa: int) -> MachineCounters:
    """A kernel's files as they are after so much; the reader of them."""
    files = {
        "proc/stat": STAT.format(busy=busy, idle=idle),
        "proc/meminfo": MEMINFO,
        "proc/net/dev": NET.format(lo=eth, eth=eth),
        "proc/diskstats": DISKS.format(read=read),
        "sys/block/vda/device/model": "",
        "sys/block/loop0/size": "1",
        "sys/class/net/eth0/device/vendor": "",
        "sys/class/net/docker0/mtu": "1500",
        "sys/class/infiniband/rdmap0s6/ports/1/hw_counters/rx_bytes": f"{efa}\n",
        "sys/class/infiniband/rdmap0s6/ports/1/hw_counters/tx_bytes": "7\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return MachineCounters(root, root / "proc", root / "sys")


def test_shares_and_rates_are_those_between_two_readings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    counters = machine(tmp_path, busy=1000, idle=9000, eth=6_000_000_000, read=2000, efa=1)
    monkeypatch.setattr(time, "monotonic", lambda: 110.0)
    machine(tmp_path, busy=1300, idle=9700, eth=6_000_001_000, read=4000, efa=5_000_001)
    reading = counters.read()
    assert reading["cpu"] == pytest.approx(0.3)
    assert reading["memory"] == pytest.approx(0.75)
    assert reading["net_in"] == pytest.approx(500_100), "eth0 and EFA; not the loopback or a bridge"
    assert reading["net_out"] == 0
    assert reading["disk_read"] == pytest.approx(2000 * 512 / 10), (
        "a disk once, without its partition"
    )
    assert 0 < reading["disk"] < 1


def test_this_machine_says_what_it_knows(tmp_path: Path) -> None:
    counters = MachineCounters(tmp_path)
    reading = counters.read()
    assert reading.keys() <= set(MACHINE_NUMBERS)
    assert all(value >= 0 for value in reading.values())
    if sys.platform == "linux":
        assert {"memory", "disk", "net_in", "disk_write"} <= reading.keys()


def test_a_system_without_these_files_says_nothing_wrong(tmp_path: Path) -> None:
    counters = MachineCounters(tmp_path / "no disk", tmp_path, tmp_path)
    assert counters.read() == {}


def test_gpus_are_counted_together_and_what_one_cannot_tell_is_left_out() -> None:
    gpus = Gpus()
    assert gpus("0, 97, 61234, 81559\n") == {"device": 0.97, "device_memory": 61234 / 81559}
    assert gpus("1, 51, 0, 81559\n") == {"device": 0.74, "device_memory": 61234 / 81559 / 2}
    assert gpus("1, [N/A], [N/A], [N/A]\n") == {"device": 0.97, "device_memory": 61234 / 81559}
    for line in (
        "",
        "No devices were found\n",
        "Failed to initialize NVML: Driver/library version mismatch\n",
    ):
        assert gpus(line) is None


def report(core: str, share: float, bytes_: int) -> dict[str, Any]:
    """A process on one of two cores, as neuron-monitor tells of it on ml.trn1.2xlarge (user guide,
    Neuron 2.29).
    """
    cores = {other: {"neuroncore_utilization": share if other == core else 0} for other in "01"}
    return {
        "pid": 26102,
        "neuron_runtime_tag": "26102",
        "error": "",
        "report": {
            "neuroncore_counters": {
                "period": 9.999577264,
                "neuroncores_in_use": cores,
                "error": "",
            },
            "memory_used": {
                "period": 9.999155887,
                "loaded_models": [],
                "error": "",
                "neuron_runtime_used_bytes": {
                    "host": 610705408,
                    "neuron_device": bytes_,
                    "usage_breakdown": {
                        "host": {"application_memory": 609656832, "dma_buffers": 1048576}
                    },
                },
            },
        },
    }


HARDWARE = {
    "neuron_device_type": "trainium", "neuroncore_version": "v2", "neuron_device_count": 1,
    "neuron_device_memory_size": 34359738368, "neuroncore_per_device_count": 2, "error": "",
}  # fmt: skip


def neuron_line(*reports: dict[str, Any], hardware: Any = HARDWARE) -> str:
    about = {
        "instance_info": {"instance_type": "trn1.2xlarge", "error": ""},
        "neuron_hardware_info": hardware,
    }
    return json.dumps({"neuron_runtime_data": list(reports), "system_data": {}, **about}) + "\n"


def test_neuron_cores_are_counted_over_all_processes_and_an_unused_one_is_idle() -> None:
    one, two = report("0", 84.0, 8589934592), report("1", 42.0, 4294967296)
    assert neuron(neuron_line(one, two)) == pytest.approx({"device": 0.63, "device_memory": 0.375})
    assert neuron(neuron_line(one)) == pytest.approx({"device": 0.42, "device_memory": 0.25})
    assert neuron(neuron_line()) == {"device": 0.0, "device_memory": 0.0}
    old = {"neuron_device_count": 1, "neuroncore_per_device_count": 2, "error": ""}
    assert neuron(neuron_line(one, hardware=old)) == pytest.approx({"device": 0.42}), (
        "an older version does not tell its memory"
    )
    for line in (
        "",
        "{",
        "[]",
        "{}",
        neuron_line(hardware=None),
        neuron_line({"report": None}),
        "null",
    ):
        assert neuron(line) is None


@pytest.mark.parametrize(
    ("tool", "prints", "expected"),
    [
        ("nvidia-smi", "0, 97, 61234, 81559\n", {"device": 0.97, "device_memory": 61234 / 81559}),
        (
            "neuron-monitor",
            neuron_line(report("0", 84.0, 8589934592)),
            {"device": 0.42, "device_memory": 0.25},
        ),
    ],
)
def test_a_tool_on_the_path_is_started_heard_and_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tool: str,
    prints: str,
    expected: dict[str, float],
) -> None:
    (tmp_path / "said").write_text(prints)
    (tmp_path / tool).write_text(
        f'#!/bin/sh\necho "$@" >{tmp_path}/asked\n/bin/cat {tmp_path}/said\nexec /bin/sleep 600\n'
    )
    (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    devices = DeviceUse(10)
    until = time.monotonic() + 30
    while not (reading := devices.read()) and time.monotonic() < until:
        time.sleep(0.01)
    assert reading == expected
    arguments = (tmp_path / "asked").read_text().split()
    if tool == "nvidia-smi":
        assert arguments[-2:] == ["-l", "10"]
    else:
        assert json.loads(
            Path(arguments[arguments.index("-c") + 1]).read_text()
        ) == neuron_settings(10)
    later = time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert devices.read() == {}, "a tool that fell silent says nothing of now"
    devices.close()
    assert tool == "nvidia-smi" or not Path(arguments[arguments.index("-c") + 1]).exists()


def test_no_tool_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("no program")
    (tmp_path / "nvidia-smi").chmod(0o755)
    for path in (tmp_path, tmp_path / "nothing"):
        monkeypatch.setenv("PATH", str(path))
        devices = DeviceUse(10)
        assert devices.read() == {}
        devices.close()


def test_every_reading_is_kept_and_their_means_are_said(tmp_path: Path) -> None:
    said: list[str] = []
    watch = MachineWatch(tmp_path / "data", "algo-2", MachineCounters(tmp_path), say=said.append)
    for _ in range(1 + READINGS_PER_LINE):
        watch.take()
    assert len(said) == 2, "the first, and the mean of those after it"
    watch.close()
    assert len(said) == 3
    records = [
        json.loads(line)
        for line in (tmp_path / "data/machine-algo-2.jsonl").read_text().splitlines()
    ]
    assert len(records) == 2 + READINGS_PER_LINE
    assert all(record["time"] > 1.7e9 for record in records)
    read = machine_record(said[1])
    assert read is not None
    assert read["memory"] == pytest.approx(
        sum(r["memory"] for r in records[1 : 1 + READINGS_PER_LINE]) / READINGS_PER_LINE, abs=1e-3
    )


def test_a_folder_that_refuses_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("in the way")
    said: list[str] = []
    watch = MachineWatch(tmp_path / "data", "algo-1", MachineCounters(tmp_path), say=said.append)
    watch.take()
    watch.take()
    watch.close()
    assert sum("cannot be written (" in text for text in said) == 1
