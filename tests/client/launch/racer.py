"""One of two processes that race: `python -m tests.client.launch.racer NAME ROUNDS` claims the
checkpoints of one run a round.

It says `ready` before each round, waits for a line on stdin, and answers `won` or the sentence that
it lost with.
"""

from __future__ import annotations

import sys

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.core.errors import JobError
from smtrain.core.protocol.owner import Fence, Owner, status_of


def main() -> None:
    name, rounds = sys.argv[1], int(sys.argv[2])
    target = SageMakerBackend("local")
    status = status_of(lambda _: target.sagemaker)
    for number in range(rounds):
        me = Owner(f"{name}-{number}", target.region_name(), "000000000000")
        fence = Fence(
            target.s3,
            f"s3://{target.default_bucket()}/{sys.argv[3]}/race{number}/checkpoints/",
            me,
            status,
        )
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            fence.claim()
            print("won", flush=True)
        except JobError as error:
            print(error, flush=True)


if __name__ == "__main__":
    main()
