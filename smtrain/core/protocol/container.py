"""The inputs and outputs of a training container: SageMaker's /opt/ml contract.

Everything is read from files below `ml_root()`, which the v2 toolkit, the v3 drivers, the local
sandbox and a shell can all provide; SM_* variables override the path of a folder.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from smtrain.core.errors import SmtrainError, first_line
from smtrain.core.files import read_object

PREPARED_FORMAT = 1  # format_version in the manifest.json of prepared data
FAILURE_LIMIT = 1024  # characters of output/failure that reach FailureReason


def ml_root() -> Path:
    """/opt/ml, or its replacement in the local sandbox."""
    return Path(os.environ.get("SMTRAIN_ML_ROOT", "/opt/ml"))


def listings_name(job: str) -> str:
    """The name of a file next to the stage's config: digests of the listings of the user's own
    prefixes, by URI.
    """
    return f"{job}.inputs.json"


@dataclass(frozen=True)
class Container:
    """One host of a job."""

    root: Path
    hosts: tuple[str, ...]
    host: str

    @classmethod
    def from_files(cls) -> Container:
        """Read `resourceconfig.json`; without it, this is a single host named algo-1."""
        root = ml_root()
        try:
            resources = read_object(root / "input/config/resourceconfig.json")
            hosts, host = tuple(map(str, resources["hosts"])), resources["current_host"]
            if host not in hosts:
                raise ValueError(f"{host!r} is not among its hosts")
        except FileNotFoundError:
            return cls(root, ("algo-1",), "algo-1")
        except (OSError, ValueError, KeyError, TypeError) as error:
            file = root / "input/config/resourceconfig.json"
            raise SmtrainError(
                f"{file} is damaged ({first_line(error)}); launch the stage again"
            ) from None
        return cls(root, hosts, str(host))

    @property
    def instance_type(self) -> str | None:
        """The type of this host, which SageMaker may have selected from several; None elsewhere."""
        try:
            resources = read_object(self.root / "input/config/resourceconfig.json")
        except (OSError, ValueError):
            return None
        type_ = resources.get("current_instance_type")
        return type_ if isinstance(type_, str) else None

    @property
    def host_rank(self) -> int:
        return self.hosts.index(self.host)

    def channel(self, name: str) -> Path:
        """The folder of an input channel; raises `SmtrainError` if the job has no such channel."""
        folder = Path(os.environ.get(f"SM_CHANNEL_{name.upper()}", self.root / "input/data" / name))
        if not folder.is_dir():
            raise SmtrainError(
                f"{folder}: the job has no input channel named {name!r}; add it to the request"
            )
        return folder

    def has_channel(self, name: str) -> bool:
        return Path(
            os.environ.get(f"SM_CHANNEL_{name.upper()}", self.root / "input/data" / name)
        ).is_dir()

    @property
    def model_dir(self) -> Path:
        return Path(os.environ.get("SM_MODEL_DIR", self.root / "model"))

    @property
    def output_data_dir(self) -> Path:
        return Path(os.environ.get("SM_OUTPUT_DATA_DIR", self.root / "output/data"))

    @property
    def tensorboard_dir(self) -> Path:
        """Copied to S3 while the job runs, if the request has a TensorBoardOutputConfig."""
        return self.root / "output/tensorboard"

    @property
    def checkpoint_dir(self) -> Path:
        """The checkpoints of all jobs of the run."""
        return self.root / "checkpoints"

    @property
    def job(self) -> str:
        """The job's name, as SageMaker passes it; empty in a shell."""
        return os.environ.get("TRAINING_JOB_NAME", "")

    @property
    def listings(self) -> str:
        """The record of the user's prefixes when the job was launched (`listings_name`); empty
        without any.
        """
        path = self.root / "input/data/config" / listings_name(self.job)
        return path.read_text("utf-8", "replace") if path.is_file() else ""

    def report_failure(self, message: str) -> None:
        """Write the first failure of this host to the file from which SageMaker takes
        FailureReason.

        On a full disk no file is left: SageMaker then shows the last line of the log.
        """
        path = self.root / "output/failure"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as out:
                out.write(message[:FAILURE_LIMIT])
        except FileExistsError:
            pass  # the failure of an earlier rank is the cause of this one
        except OSError:
            with contextlib.suppress(OSError):
                if not path.stat().st_size:
                    path.unlink()
