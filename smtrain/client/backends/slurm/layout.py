"""Where a job's files lie on the shared folder; the script, the node's runner and the client agree on it.

    <shared>/<run>/jobs/<job>/request.json    what was asked for, as CreateTrainingJob takes it
                              job.sh          the sbatch script
                              history.jsonl   what happened, one event a line
                              id              the Slurm job that it was submitted as
                              stop            there: somebody asked it to stop
                              code/           the bundle, unpacked
                              slurm.out       what Slurm and its commands said in this attempt
                              logs/algo-1.log every line of a node behind its time (ISO 8601, UTC)
                              logs/slurm-out.log  slurm.out of the attempts before, in the same form
                              nodes/algo-1/   the node's /opt/ml, links into the shared folder
                              output/model/   what the stage left; output/data/: what it measured

It is the layout that SageMaker makes in S3, so that one function names a path or a URI (client/launch/request.py).
"""

from __future__ import annotations

SCHEME = "file://"
REQUEST, SCRIPT, HISTORY, STOP = "request.json", "job.sh", "history.jsonl", "stop"
WORDS, WORDS_LOG = "slurm.out", "slurm-out.log"
RESERVE = ".reserve"
"""Room on the disk for the words of an end, which a full one would else not take."""


def path_of(uri: str) -> str:
    """The absolute path of a file:// URI."""
    return uri.removeprefix(SCHEME)


def uri_of(path: str) -> str:
    """The file:// URI of an absolute path."""
    return f"{SCHEME}{path}"
