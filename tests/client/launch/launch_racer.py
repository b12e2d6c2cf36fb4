"""One of two processes that launch one run at once, each with different settings: `python -m
tests.client.launch.launch_racer`.

For each path of a config that it reads from stdin it says `launched`, or the sentence that the
launch ended with.
"""

from __future__ import annotations

import sys

import smtrain
from smtrain.core.errors import JobError


def main() -> None:
    for line in sys.stdin:
        try:
            smtrain.launch(line.strip(), wait=False, say=lambda _: None)
            print("launched", flush=True)
        except JobError as error:
            print(error, flush=True)


if __name__ == "__main__":
    main()
