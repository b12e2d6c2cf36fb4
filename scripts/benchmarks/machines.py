"""Compare a preparation on several machines with one: `prepare` jobs of 1 and of --machines local
hosts.

The text is --corpus, a folder of JSON lines, or --megabytes of the text of `scripts/bench data`;
the tokenizer a byte-level BPE of 32,000 trained on some of it. All hosts share this machine's
cores, so the same work on more hosts takes as long if sharing it loses nothing. Four jobs: half of
the text and all of it, on one host and on several.

  identical      every file of the result has the same SHA-256 on one host and on several, and for half of the text too
  over_single    MB of text per second of a job's time, several hosts over one, over all of the text, start-up included
  over_single_per_core   the same per second of processors, which other load on the machine changes less
  peak_mib_*     the largest anonymous memory of one host; `double` is that of all the text over that of half of it
  peak_disk_shards   the most that a host had under /opt/ml, without its inputs, over the largest pair of the result
  cpu_over_coordinator   with --coordinator, a checkout of 5923b272, which had its own coordinator
                 in place of Ray: the processor seconds of several hosts over those there, on all of
                 the text
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SEQ_LEN = 4096
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--machines", type=int, default=3)
    parser.add_argument("--corpus", type=Path, help="a folder of .jsonl files with a column `text`")
    parser.add_argument("--megabytes", type=int, default=500, help="of text, if no corpus is given")
    parser.add_argument("--workers", type=int, help="of each host; default: every core")
    parser.add_argument("--shard-size", type=float, default=8.0, help="data.shard_size, GB")
    parser.add_argument("--whole", action="store_true", help="only the two jobs on all of the text")
    parser.add_argument(
        "--coordinator", type=Path, help="a checkout of commit 5923b272, to compare with"
    )
    parser.add_argument("--folder", type=Path, help="folder for text and tokens")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-machines-") as folder:
        os.environ["SMTRAIN_HOME"] = str(Path(folder) / "home")  # a separate control plane
        from smtrain.plane.client import shut_down

        try:
            result = measure(Path(folder), options)
        finally:
            shut_down()
    print(
        json.dumps(result) if options.json else "\n".join(f"{k:24} {v}" for k, v in result.items())
    )


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    corpus = options.corpus or gather_text(folder / "gathered", options.megabytes)
    files = sorted(corpus.glob("*.jsonl"))
    tokenizer_for(files, folder / "model")
    whole_folder, half = folder / "whole", folder / "half"
    texts = [whole_folder] if options.whole else [half, whole_folder]
    sizes = {text: copy_share(files, text, 1.0 if text == whole_folder else 0.5) for text in texts}
    run_by_case: dict[tuple[Path, int], HostUsage] = {}
    for text in texts:
        for count in (1, options.machines):
            run_by_case[text, count] = run(folder, text, count, options)
            print(
                f"{text.name} on {count}: {run_by_case[text, count]}", file=sys.stderr, flush=True
            )
    single_host, several = run_by_case[whole_folder, 1], run_by_case[whole_folder, options.machines]
    pairs = [(run_by_case[text, 1], run_by_case[text, options.machines]) for text in texts]
    result = {
        "over_single": round(single_host.seconds / several.seconds, 3),
        "over_single_per_core": round(single_host.cpu / several.cpu, 3),
        "identical": all(single.digest == several_hosts.digest for single, several_hosts in pairs),
        "machines": options.machines,
        "text_mb": round(sizes[whole_folder] / 1e6),
        "mb_s_single": round(sizes[whole_folder] / 1e6 / single_host.seconds, 1),
        "mb_s_several": round(sizes[whole_folder] / 1e6 / several.seconds, 1),
        "mb_per_cpu_s_single": round(sizes[whole_folder] / 1e6 / single_host.cpu, 1),
        "mb_per_cpu_s_several": round(sizes[whole_folder] / 1e6 / several.cpu, 1),
        "peak_mib_single": round(single_host.peak),
        "peak_mib_several": round(several.peak),
        "peak_disk_mb_several": round(several.disk / 1e6),
        "shard_mb": round(several.shard / 1e6),
        "peak_disk_shards": round(several.disk / several.shard, 2),
    }
    if not options.whole:
        result |= {
            "half_mb": round(sizes[half] / 1e6),
            "double_single": round(single_host.peak / pairs[0][0].peak, 3),
            "double_several": round(several.peak / pairs[0][1].peak, 3),
        }
    if options.coordinator:
        coordinator_figures = with_coordinator(corpus, options)
        result |= {
            "cpu_over_coordinator": round(
                coordinator_figures["mb_per_cpu_s_several"] / result["mb_per_cpu_s_several"], 3
            ),
            "coordinator": {
                key: coordinator_figures[key]
                for key in ("over_single", "mb_s_several", "mb_per_cpu_s_several")
            },
        }
    return result


def with_coordinator(text: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of this benchmark in another checkout, on the same text."""
    command = [
        sys.executable,
        "scripts/benchmarks/machines.py",
        "--json",
        "--corpus",
        str(text.absolute()),
        "--machines",
        str(options.machines),
    ]
    command += ["--workers", str(options.workers)] if options.workers else []
    command += ["--folder", str(options.folder.absolute())] if options.folder else []
    environment = {**os.environ, "PYTHONPATH": str(options.coordinator.absolute())}
    result = subprocess.run(
        command, cwd=options.coordinator, env=environment, stdout=subprocess.PIPE, check=True
    )
    figures: dict[str, Any] = json.loads(result.stdout)
    return figures


def gather_text(folder: Path, megabytes: int) -> Path:
    """Eight files of text of this machine; fewer bytes than requested if there are no more."""
    from scripts.benchmarks.data import documents

    folder.mkdir()
    file_bytes = megabytes * 10**6 // 8
    number, written_bytes = 0, 0
    out = (folder / "00.jsonl").open("w", encoding="utf-8")
    for text in documents(megabytes * 10**6):
        if written_bytes >= file_bytes:
            out.close()
            number, written_bytes = number + 1, 0
            out = (folder / f"{number:02}.jsonl").open("w", encoding="utf-8")
        written_bytes += out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    out.close()
    return folder


def tokenizer_for(files: list[Path], folder: Path) -> None:
    """A tokenizer of 32,000 of the first documents of every file, and a small model's config next
    to it.
    """
    from transformers import LlamaConfig

    from smtrain.core.demo.inputs import save_tokenizer

    texts: list[str] = []
    for path in files:
        with path.open(encoding="utf-8") as lines:
            texts += [
                json.loads(line)["text"][:20_000]
                for line, _ in zip(lines, range(200), strict=False)
            ]
    save_tokenizer(texts, folder, vocabulary=32_000, end="<|endoftext|>")
    LlamaConfig(
        vocab_size=32_000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LEN,
    ).save_pretrained(folder)


def copy_share(files: list[Path], folder: Path, share: float) -> int:
    """Write that share of every file's lines, by bytes, to `folder`; return the bytes."""
    folder.mkdir()
    for path in files:
        if share == 1.0:
            shutil.copyfile(path, folder / path.name)
            continue
        remaining_bytes = path.stat().st_size * share
        with path.open("rb") as lines, (folder / path.name).open("wb") as out:
            for line in lines:
                remaining_bytes -= out.write(line)
                if remaining_bytes <= 0:
                    break
    return sum(path.stat().st_size for path in folder.iterdir())


@dataclass
class HostUsage:
    """Usage of a job: `peak` MiB of its largest host, its seconds and its processor seconds.

    `disk` are bytes of the host that had most, and `shard` those of the largest pair that the job
    wrote.
    """

    peak: float = 0.0
    disk: int = 0
    shard: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    digest: str = ""
    ticks: dict[int, int] = field(default_factory=dict, repr=False)

    def look(self, job: Any) -> None:
        """Add the current usage of its processes."""
        from tests.processes import processes_of, read

        hosts: dict[str, float] = {}
        folders: dict[str, str] = {}
        for pid in processes_of(job):
            fields = read(pid, "stat").rpartition(b")")[2].split()
            if len(fields) > 12:
                self.ticks[pid] = int(fields[11]) + int(fields[12])
            try:
                host = os.readlink(f"/proc/{pid}/ns/mnt")
            except OSError:
                continue
            rows = [
                row.split()
                for row in read(pid, "status").splitlines()
                if row.startswith(b"RssAnon")
            ]
            hosts[host] = hosts.get(host, 0.0) + sum(int(row[1]) for row in rows) / 1024
            roots = [
                word[16:].decode()
                for word in read(pid, "environ").split(b"\0")
                if word[:16] == b"SMTRAIN_ML_ROOT="
            ]
            folders.setdefault(host, f"/proc/{pid}/root{roots[0] if roots else '/opt/ml'}")
        self.peak = max([self.peak, *hosts.values()])
        self.disk = max([self.disk, *map(disk_bytes, folders.values())])
        self.cpu = sum(self.ticks.values()) / _TICKS


def disk_bytes(root: str) -> int:
    """Bytes on the disk under /opt/ml of a host, without its inputs and its code."""
    total = 0
    for folder, folders, files in os.walk(root):
        if folder == root:
            folders[:] = [name for name in folders if name not in ("input", "code")]
        for name in files:
            with suppress(OSError):
                total += os.lstat(f"{folder}/{name}").st_blocks * 512
    return total


def run(folder: Path, text: Path, count: int, options: argparse.Namespace) -> HostUsage:
    """A prepare job of the local control plane."""
    import smtrain

    os.sync()
    config: dict[str, Any] = {
        "name": f"bench-{text.name}-{count}",
        "target": "local",
        "model": {"path": str(folder / "model"), "init": "scratch"},
        "data": {
            "path": str(text),
            "workers": options.workers,
            "machines": count,
            "shard_size": options.shard_size,
        },
        "train": {"seq_len": SEQ_LEN},
        "compute": {"instance_type": "ml.trn1.2xlarge", "processes_per_instance": 1},
    }
    job = smtrain.launch(config, stage="prepare", wait=False, say=lambda _: None)
    hosts, stop_event = HostUsage(), threading.Event()

    def watch() -> None:
        while not stop_event.is_set():
            hosts.look(job)
            time.sleep(0.3)  # a reading goes through all processes of this machine

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        job.wait()
    finally:
        stop_event.set()
        watcher.join()
    description = job.describe()
    hosts.seconds = (
        description["TrainingEndTime"] - description["TrainingStartTime"]
    ).total_seconds()
    from smtrain.client.backends.checksums import sha256_of
    from smtrain.client.jobs.results import download
    from smtrain.worker.data.manifest import DatasetManifest

    out = folder / f"out-{text.name}-{count}"
    download(job.target, [(job.output, out)])
    manifest = DatasetManifest.load(out)
    digest = hashlib.sha256(json.dumps(manifest.files, sort_keys=True).encode())
    for path in sorted(out.glob("tokens*")):
        digest.update(sha256_of(path).encode())
    hosts.digest = digest.hexdigest()
    hosts.shard = max(path.stat().st_size for path in out.glob("tokens*.bin"))
    shutil.rmtree(out)
    return hosts


if __name__ == "__main__":
    main()
