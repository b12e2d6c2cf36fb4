"""The rendezvous of a local job's ranks cannot be reached from another machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from smtrain.core.protocol.entrypoints import entrypoints_folder
from tests.ports import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Each rank tells which sockets it and torchrun listen on, once all have met.
SCRIPT = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
held = set()
for pid in (os.getpid(), os.getppid()):
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held.add(os.readlink(fd))
        except OSError:
            pass
found = []
for table in ("tcp", "tcp6"):
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == "0A" and f"socket:[{rest[5]}]" in held:
            found.append(local.split(":")[0])
Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""
LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF0000" + "0100007F"}


@pytest.mark.parametrize(
    "torchrun", [pytest.param("rendezvous.py", marks=pytest.mark.full), "forking.py"]
)
def test_ranks_of_this_machine_listen_on_loopback_alone(tmp_path: Path, torchrun: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    port = free_port()
    environment = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    }
    done = subprocess.run(
        [
            sys.executable,
            str(entrypoints_folder() / torchrun),
            "--nnodes=1",
            "--nproc_per_node=2",
            "--node_rank=0",
            "--master_addr=127.0.0.1",
            f"--master_port={port}",
            str(script),
            str(tmp_path),
        ],
        env={
            **environment,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "SMTRAIN_ML_ROOT": str(tmp_path),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    found = [
        address
        for rank in (0, 1)
        for address in json.loads((tmp_path / f"rank{rank}.json").read_text())
    ]
    assert found
    assert set(found) <= LOOPBACK, found
