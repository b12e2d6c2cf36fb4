"""Stage prepare: text in channel `text` (or `text_0`...), the tokenizer in channel `model` ->
packed tokens.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

from smtrain.core.config import JobConfig
from smtrain.core.config.schema import text_channels, with_inputs
from smtrain.core.protocol.container import Container
from smtrain.worker.entry import main
from smtrain.worker.output import fail

if TYPE_CHECKING:
    from smtrain.worker.data.manifest import DatasetManifest
    from smtrain.worker.data.part_uploads import PartUploads
    from smtrain.worker.data.prepare.spread.driver import Spread

T = TypeVar("T")


def parts(container: Container) -> PartUploads | None:
    """If the job's request has a checkpoint prefix, keep what is done there for the next
    machine.
    """
    from smtrain.worker.data.part_uploads import PART_BYTES, PartUploads

    megabytes = os.environ.get("SMTRAIN_PART_MB")
    part_bytes = round(float(megabytes) * 1e6) if megabytes else PART_BYTES
    if not container.checkpoint_dir.is_dir():
        return None
    uploads = PartUploads(container.checkpoint_dir, part_bytes)
    signal.signal(signal.SIGTERM, lambda *_: uploads.stop.set())
    return uploads


def places(container: Container) -> tuple[str | None, str | None]:
    """The places of the shares and of the dataset's files on several machines; None: next to the
    output.

    The nodes of a Slurm job share a disk. The hosts of any other job share only S3.
    """
    from smtrain.stages.prepare import SHARES

    shares = os.environ.get(SHARES)
    if not shares or not shares.startswith("s3://"):
        return shares, None
    # next to what SageMaker uploads from /opt/ml/model, which has the manifest
    return shares, f"{shares.rpartition('/prepare/')[0]}/jobs/{container.job}/output/model"


def on_machines(
    config: JobConfig, container: Container, run: Callable[[Spread | None], T]
) -> T | None:
    """Call `run` with the machines of `data.machines` or `data.ray_address`, or with None for this
    one.

    Hosts other than the first work for it instead, and return None.
    """
    data = config.data
    if len(container.hosts) == 1 and not data.ray_address:
        return run(None)
    from launch import MASTER_PORT, address

    from smtrain.worker.data.prepare.spread.driver import Spread
    from smtrain.worker.data.prepare.spread.nodes import join, on_cluster
    from smtrain.worker.data.prepare.spread.on_ray import RayExecutor
    from smtrain.worker.data.prepare.spread.shared_folder import SharedPlace
    from smtrain.worker.data.read.shards import SHARE_BYTES
    from smtrain.worker.data.resumable import to_stderr

    work, out = places(container)
    stop = threading.Event()
    megabytes = os.environ.get("SMTRAIN_SHARE_MB")
    size = round(float(megabytes) * 1e6) if megabytes else SHARE_BYTES

    def spread(executor: RayExecutor) -> T:
        # Ray has set its own handler
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        return run(Spread(executor, work, out, size, data.max_crashed, stop))

    def fail_job(sentence: str) -> NoReturn:
        fail(container, sentence)

    if data.ray_address:
        with RayExecutor(data.ray_address, ships_code=True, on_loss=fail_job) as executor:
            return spread(executor)
    assert work
    host_address = own_address(container.host)
    if container.host_rank:
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        print(f"{container.host} works for {container.hosts[0]}", flush=True)
        join(SharedPlace(work), host_address, stop)
        return None
    port = int(os.environ.get("SMTRAIN_MASTER_PORT", MASTER_PORT))
    return on_cluster(
        SharedPlace(work), address(container.hosts[0]), port, to_stderr, spread, fail_job
    )


def own_address(host: str) -> str:
    """The address of this host for other hosts of its job."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        pass
    if "SMTRAIN_ML_ROOT" in os.environ and "SMTRAIN_MASTER_ADDR" not in os.environ:
        return "127.0.0.1"  # hosts of the local plane have no names
    return socket.gethostbyname(socket.gethostname())


def stage(config: JobConfig, container: Container) -> None:
    from smtrain.worker.data.prepare.prepare import prepare
    from smtrain.worker.data.prepare.sft import prepare_sft
    from smtrain.worker.data.prepare_options import PrepareOptions
    from smtrain.worker.data.read.hub import HUB

    # the first process of a container does not end by a signal that it has no handler for
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    data = config.data
    source_paths = [source.path for source in data.all_sources] or [
        ""
    ]  # in a shell the channel alone says it
    if config.model.token and any(path.startswith(HUB) for path in source_paths):
        from token_by_name import read

        os.environ["HF_TOKEN"] = read(
            config.model.token
        )  # datasets reads it from this process's environment
    sources = [
        path if path.startswith(HUB) else container.channel(name)
        for name, path in zip(text_channels(config), source_paths, strict=True)
    ]
    placed_config = with_inputs(
        config, lambda name, path: path if path.startswith(HUB) else str(container.channel(name))
    )
    options = PrepareOptions.of(placed_config, listings=container.listings)
    prepare_dataset = prepare if config.train.objective == "pretrain" else prepare_sft

    def run(spread: Spread | None) -> DatasetManifest:
        uploads = None if spread else parts(container)
        return prepare_dataset(
            sources,
            container.model_dir,
            container.channel("model"),
            options,
            parts=uploads,
            spread=spread,
        )

    manifest = on_machines(config, container, run)
    if manifest is None:
        return
    print(
        f"{manifest.documents} documents, {manifest.tokens} tokens, {manifest.samples} samples, "
        f"by {manifest.tokenized_by}",
        flush=True,
    )
    if manifest.validation:
        print(
            f"held out for validation: {manifest.validation['documents']} documents, "
            f"{manifest.validation['tokens']} tokens",
            flush=True,
        )
    for reason, count in manifest.dropped.items():
        print(f"left out: {count} {reason}", flush=True)
    for finding, count in manifest.noted.items():
        print(f"found: {count} {finding}", flush=True)
    for line in manifest.bad_lines:
        print(f"skipped: {line}", flush=True)


if __name__ == "__main__":
    main(stage)
