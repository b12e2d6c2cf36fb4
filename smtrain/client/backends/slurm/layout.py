"""The layout of a job's files on the shared folder, shared by the script, the node's runner and the client.

    <shared>/<run>/jobs/<job>/request.json    the request, as CreateTrainingJob takes it
                              job.sh          the sbatch script
                              history.jsonl   what happened, one event a line
                              id              the Slurm job ID
                              stop            exists if the user asked the job to stop
                              code/           the bundle, unpacked
                              slurm.out       output of Slurm and its commands in this attempt
                              logs/algo-1.log the lines of a node, each after its time (ISO 8601, UTC)
                              logs/slurm-out.log  slurm.out of earlier attempts, in the same form
                              nodes/algo-1/   the node's /opt/ml, links into the shared folder
                              output/model/   the stage's result; output/data/: its measurements

It is the layout that SageMaker uses in S3, so that one function makes both paths and URIs (client/launch/request.py).
"""

from __future__ import annotations

SCHEME = "file://"
REQUEST, SCRIPT, HISTORY, STOP = "request.json", "job.sh", "history.jsonl", "stop"
WORDS, WORDS_LOG = "slurm.out", "slurm-out.log"
RESERVE = ".reserve"
"""Disk space reserved for the last event, so that it can be written to a full disk."""


def path_of(uri: str) -> str:
    """The absolute path of a file:// URI."""
    return uri.removeprefix(SCHEME)


def uri_of(path: str) -> str:
    """The file:// URI of an absolute path."""
    return f"{SCHEME}{path}"
