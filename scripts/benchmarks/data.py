"""Text to tokens, and tokens to batches, compared with the libraries themselves and with the sample
notebooks.

The text is what this machine has (Python's own sources, those of installed packages, /usr/share),
as one JSON line per file, and the same as Parquet; if it is less than --megabytes, it is
repeated, and `repeated` says so. The tokenizer is a byte-level BPE of 32,000 trained on a twentieth
of it. Every measurement is a separate process, timed inside after its libraries are imported,
--rounds times in turn; figures are medians. MB are bytes of text.

  gigatoken    encode_batch on the whole text in memory, on all cores: the upper limit
  tokenizers   encode_batch_fast on the first --slow-megabytes in memory, on all cores
  notebook     the sample notebooks: load_dataset, map to tokens, map to blocks of 4096, save_to_disk, of the same part
  ours         `prepare` from JSON lines, and from Parquet, to the finished data set

`over_*` uses the slower of our two. `identical` compares every id of ours with those of
`tokenizers`, over the whole text. `peak_mib` is our process's anonymous memory; `peak_mib_double`
that of a run over the text twice. `loader_*` are samples per second at sequence length 4096: our
loader and `datasets` with a DataLoader, from a folder and through the FUSE mount of local FastFile
channels; `fuse` is null without FUSE.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SEQ_LEN = 4096
ENDINGS = {
    ".py",
    ".pyi",
    ".txt",
    ".md",
    ".rst",
    ".h",
    ".html",
    ".json",
    ".pod",
    ".pl",
    ".pm",
    ".c",
    ".tcl",
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=300, help="of text")
    parser.add_argument("--slow-megabytes", type=int, default=25, help="of text for the slow ways")
    parser.add_argument("--no-loader", action="store_true", help="leave out the loaders")
    parser.add_argument("--folder", type=Path, help="folder for text and tokens")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(CASES[options.case[0]](Path(options.case[1]))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-data-") as folder:
        result = measure(Path(folder), options)
    print(
        json.dumps(result) if options.json else "\n".join(f"{k:24} {v}" for k, v in result.items())
    )


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, with the text written under `folder`."""
    text_bytes, repetitions = write_text(
        folder, options.megabytes * 10**6, options.slow_megabytes * 10**6
    )
    rates: dict[str, list[float]] = {}
    tokens: dict[str, int] = {}
    peaks: dict[str, float] = {}
    for _ in range(options.rounds):
        for name in ("gigatoken", "ours_jsonl", "ours_parquet", "tokenizers", "notebook"):
            os.sync()
            case, peak = run_case(name, folder)
            rates.setdefault(name, []).append(case["bytes"] / 1e6 / case["seconds"])
            tokens[name] = case["tokens"]
            peaks[name] = max(peak, peaks.get(name, 0.0))
    per_byte = tokens["gigatoken"] / text_bytes
    median = {name: statistics.median(values) for name, values in rates.items()}
    _, double = run_case("ours_double", folder)
    identical, _ = run_case("identical", folder)
    slower = min(median["ours_jsonl"], median["ours_parquet"])
    result: dict[str, Any] = {
        "over_gigatoken": round(slower / median["gigatoken"], 3),
        "over_tokenizers": round(slower / median["tokenizers"], 1),
        "over_notebook": round(slower / median["notebook"], 1),
        "identical": identical["identical"],
        "peak_mib": round(max(peaks["ours_jsonl"], peaks["ours_parquet"])),
        "peak_mib_double": round(double),
        "notebook_peak_mib": round(peaks["notebook"]),
        "text_mb": round(text_bytes / 1e6),
        "repeated": repetitions,
        "slow_mb": options.slow_megabytes,
        **{f"{name}_mb_s": round(value, 1) for name, value in median.items()},
        **{f"{name}_mtokens_s": round(value * per_byte, 2) for name, value in median.items()},
    }
    return result if options.no_loader else result | loaders(folder, options.rounds)


def run_case(name: str, folder: Path) -> tuple[dict[str, Any], float]:
    """The output of a case, and the peak of its processes' RssAnon in MiB."""
    command = [sys.executable, __file__, "--case", name, str(folder)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "hf"),
    }
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    peak = [0.0]

    def watch() -> None:
        while process.poll() is None:
            peak[0] = max(peak[0], sum(_anonymous(pid) for pid in _family(process.pid)))
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert process.stdout
    output = process.stdout.read().decode()
    status = process.wait()
    watcher.join()
    if status:
        raise SystemExit(f"case {name} ended with {status}; run {' '.join(command)}")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result, peak[0]


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(p for child in children for p in _family(int(child)))]


def _anonymous(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next(
        (int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith("RssAnon")),
        0.0,
    )


def write_text(folder: Path, size: int, slow: int) -> tuple[int, int]:
    """text.jsonl, text.parquet, slow.jsonl and tokenizer/; bytes of text, and how often it is
    repeated.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from smtrain.core.demo.inputs import save_tokenizer

    texts = list(documents(size))
    save_tokenizer(texts[::20], folder / "tokenizer", vocabulary=32_000, end="<|endoftext|>")
    bytes_per_pass = sum(len(d.encode()) for d in texts)
    repetitions = max(0, -(-size // bytes_per_pass) - 1)
    schema = pa.schema([("text", pa.string())])
    written_bytes = 0
    with (
        (folder / "text.jsonl").open("w", encoding="utf-8") as lines,
        (folder / "slow.jsonl").open("w", encoding="utf-8") as part,
        pq.ParquetWriter(folder / "text.parquet", schema) as table,
    ):
        for _ in range(repetitions + 1):
            for start in range(0, len(texts), 1000):
                batch = texts[start : start + 1000]
                table.write_table(pa.table({"text": pa.array(batch, pa.string())}))
                for document in batch:
                    line = json.dumps({"text": document}, ensure_ascii=False) + "\n"
                    lines.write(line)
                    if written_bytes < slow:
                        part.write(line)
                    written_bytes += len(document.encode())
    (folder / "size").write_text(str(written_bytes))
    return written_bytes, repetitions


def documents(size: int) -> Iterator[str]:
    """Text of this machine, at most about so many bytes."""
    paths = sysconfig.get_paths()
    total_bytes = 0
    for root in (
        Path(paths["stdlib"]),
        Path(paths["purelib"]),
        Path("/usr/share/doc"),
        Path("/usr/share"),
    ):
        for path in sorted(root.rglob("*")):
            if path.suffix not in ENDINGS or path.is_symlink() or not path.is_file():
                continue
            try:
                text = path.read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if text and len(text) < 2_000_000:
                yield text
                total_bytes += len(text.encode())
            if total_bytes >= size:
                return


def _texts(folder: Path, name: str) -> list[str]:
    with (folder / name).open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def _size(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def gigatoken_alone(folder: Path) -> dict[str, Any]:
    """The whole text as one Arrow column in memory, gigatoken's fastest input; with cold caches,
    like ours.
    """
    import awkward
    import gigatoken
    import pyarrow.parquet as pq

    column = pq.read_table(folder / "text.parquet")["text"]
    ak: Any = awkward
    texts = ak.from_arrow(column.cast("large_string").combine_chunks())
    texts = ak.drop_none(texts)
    size = int(ak.sum(ak.num(ak.without_parameters(texts))))
    tokenizer = gigatoken.Tokenizer(str(folder / "tokenizer"))
    began = time.perf_counter()
    ids = tokenizer.encode_batch(texts)
    return {"seconds": time.perf_counter() - began, "bytes": size, "tokens": int(ak.count(ids))}


def tokenizers_alone(folder: Path) -> dict[str, Any]:
    from tokenizers import Tokenizer

    texts = _texts(folder, "slow.jsonl")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
    count, began = 0, time.perf_counter()
    for start in range(0, len(texts), 1000):
        count += sum(
            len(e)
            for e in tokenizer.encode_batch_fast(
                texts[start : start + 1000], add_special_tokens=False
            )
        )
    return {"seconds": time.perf_counter() - began, "bytes": _size(texts), "tokens": count}


def notebook(folder: Path) -> dict[str, Any]:
    """The steps of the public SageMaker samples."""
    from itertools import chain

    import datasets
    from transformers import AutoTokenizer

    from smtrain.core.machine import cores_here

    size = _size(_texts(folder, "slow.jsonl"))
    shutil.rmtree(folder / "hf", ignore_errors=True)
    tokenizer_class: Any = AutoTokenizer
    tokenizer = tokenizer_class.from_pretrained(folder / "tokenizer")

    def group(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined_columns = {key: list(chain(*rows[key])) for key in rows}
        total = len(joined_columns["input_ids"]) // SEQ_LEN * SEQ_LEN
        cut = {
            key: [ids[i : i + SEQ_LEN] for i in range(0, total, SEQ_LEN)]
            for key, ids in joined_columns.items()
        }
        cut["labels"] = cut["input_ids"].copy()
        return cut

    began = time.perf_counter()
    data: Any = datasets.load_dataset("json", data_files=str(folder / "slow.jsonl"), split="train")
    data = data.map(
        lambda rows: tokenizer(rows["text"]),
        batched=True,
        num_proc=cores_here(),
        remove_columns=["text"],
    )
    data = data.map(group, batched=True, num_proc=cores_here())
    data.save_to_disk(str(folder / "notebook"))
    return {"seconds": time.perf_counter() - began, "bytes": size, "tokens": len(data) * SEQ_LEN}


def _prepare_by_smtrain(folder: Path, inputs: list[Path], name: str) -> dict[str, Any]:
    import awkward  # noqa: F401
    import gigatoken  # noqa: F401
    import pyarrow.json
    import pyarrow.parquet  # noqa: F401

    from smtrain.worker.data.prepare.prepare import prepare
    from smtrain.worker.data.prepare_options import PrepareOptions

    shutil.rmtree(folder / name, ignore_errors=True)
    began = time.perf_counter()
    manifest = prepare(
        inputs,
        folder / name,
        folder / "tokenizer",
        PrepareOptions(seq_len=SEQ_LEN),
        progress=lambda _: None,
    )
    seconds = time.perf_counter() - began
    assert manifest.tokenized_by.startswith("gigatoken"), manifest.tokenized_by
    size = int((folder / "size").read_text()) * len(inputs)
    return {"seconds": seconds, "bytes": size, "tokens": manifest.tokens - manifest.documents}


def identical(folder: Path) -> dict[str, Any]:
    """Compare every id of ours, from both forms, with `tokenizers`."""
    import numpy as np
    from tokenizers import Tokenizer

    from smtrain.worker.data.indexed import IndexedDataset

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
    datasets = [IndexedDataset(folder / name / "tokens") for name in ("ours_jsonl", "ours_parquet")]
    at, is_same = 0, True
    batch: list[str] = []

    def compare() -> None:
        nonlocal at, is_same
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            if encoding.ids:
                is_same &= all(np.array_equal(data[at][:-1], encoding.ids) for data in datasets)
                at += 1
        batch.clear()

    with (folder / "text.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            batch.append(json.loads(line)["text"])
            if len(batch) == 500:
                compare()
    compare()
    return {
        "identical": bool(is_same and all(len(data) == at for data in datasets)),
        "documents": at,
    }


def our_loader(folder: Path) -> dict[str, Any]:
    from smtrain.worker.data.load.loader import TokenLoader

    batch, count = 8, 400
    loader = TokenLoader(
        folder,
        seq_len=SEQ_LEN,
        global_batch_size=batch,
        dp_rank=0,
        dp_size=1,
        seed=1,
        vocab_size=32_000,
    )
    loader.batch(0)
    began = time.perf_counter()
    for step in range(1, count // batch + 1):
        loader.batch(step * batch)
    seconds = time.perf_counter() - began
    loader.close()
    return {"rate": count / seconds}


def datasets_loader(folder: Path) -> dict[str, Any]:
    import datasets
    from torch.utils.data import DataLoader

    from smtrain.core.machine import cores_here

    batch, count = 8, 400
    data: Any = datasets.load_from_disk(str(folder)).with_format("torch")
    batches = iter(
        DataLoader(data, batch_size=batch, shuffle=True, num_workers=min(2, cores_here()))
    )
    next(batches)
    began, sample_count = time.perf_counter(), 0
    for rows in batches:
        sample_count += len(rows["input_ids"])
        if sample_count >= count:
            break
    return {"rate": sample_count / (time.perf_counter() - began)}


def loaders(folder: Path, rounds: int) -> dict[str, Any]:
    """Samples a second from a folder, and through a FUSE mount of the local control plane's S3."""
    _prepare_by_smtrain(folder, [folder / "slow.jsonl"], "ours_slow")  # the same text for both
    places = {"ours": folder / "ours_slow", "datasets": folder / "notebook"}
    result: dict[str, Any] = {}
    cases = {"ours": "our_loader", "datasets": "datasets_loader"}
    for name, place in places.items():
        rates = [run_case(cases[name], place)[0]["rate"] for _ in range(rounds)]
        result[f"loader_{name}"] = round(statistics.median(rates))
    for name, place in places.items():
        try:
            with fuse_mount(place, folder / f"mount-{name}") as mount_point:
                rates = [run_case(cases[name], mount_point)[0]["rate"] for _ in range(rounds)]
            result[f"loader_{name}_fuse"] = round(statistics.median(rates), 1)
        except OSError as error:
            print(f"no FUSE: {error}", file=sys.stderr)
            result[f"loader_{name}_fuse"] = None
    return result


@contextmanager
def fuse_mount(source: Path, mountpoint: Path) -> Iterator[Path]:
    """The files of `source` in local S3, mounted like FastFile channels.

    Raises OSError if it cannot.
    """
    if not (Path("/dev/fuse").exists() and shutil.which("fusermount3")):
        raise OSError("/dev/fuse or fusermount3 is missing")
    from smtrain.plane.client import ensure_running

    endpoint = ensure_running()
    client = endpoint.session().client("s3")
    if endpoint.bucket not in {b["Name"] for b in client.list_buckets()["Buckets"]}:
        client.create_bucket(Bucket=endpoint.bucket)
    entries = []
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        name = path.relative_to(source).as_posix()
        key = f"bench-data/{source.name}/{name}"
        client.upload_file(str(path), endpoint.bucket, key)
        entries.append([key, name, path.stat().st_size, path.stat().st_mtime])
    mountpoint.mkdir()
    spec = mountpoint.with_suffix(".json")
    channel = {
        "bucket": endpoint.bucket,
        "entries": entries,
        "mountpoint": str(mountpoint),
        "log": os.devnull,
    }
    spec.write_text(json.dumps({"data": channel}))
    environment = {**os.environ, **endpoint.environment(), "PYTHONPATH": str(ROOT)}
    daemon = subprocess.Popen(
        [sys.executable, "-m", "smtrain.plane.server.fastfile", str(spec)], env=environment
    )
    try:
        deadline = time.monotonic() + 60
        while not mountpoint.is_mount():
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise OSError("the mount did not come up")
            time.sleep(0.05)
        yield mountpoint
    finally:
        subprocess.run(["fusermount3", "-u", str(mountpoint)], check=False)
        daemon.wait()
        for key in [str(entry[0]) for entry in entries]:
            client.delete_object(Bucket=endpoint.bucket, Key=key)


CASES = {
    "gigatoken": gigatoken_alone,
    "tokenizers": tokenizers_alone,
    "notebook": notebook,
    "ours_jsonl": lambda folder: _prepare_by_smtrain(folder, [folder / "text.jsonl"], "ours_jsonl"),
    "ours_parquet": lambda folder: _prepare_by_smtrain(
        folder, [folder / "text.parquet"], "ours_parquet"
    ),
    "ours_double": lambda folder: _prepare_by_smtrain(
        folder, [folder / "text.jsonl", folder / "text.parquet"], "ours_double"
    ),
    "identical": identical,
    "our_loader": our_loader,
    "datasets_loader": datasets_loader,
}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
