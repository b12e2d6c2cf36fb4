"""Run transformers' server on a Unix socket, for which it has no option: `python
unix_socket_server.py SOCKET serve MODEL`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys

import uvicorn


def main() -> None:
    """Set uvicorn's `uds`, which goes before host and port, then run the program `transformers`."""
    socket_path, *arguments = sys.argv[1:]
    init = uvicorn.Config.__init__
    uvicorn.Config.__init__ = functools.partialmethod(init, uds=socket_path)  # type: ignore[assignment, method-assign]
    (program,) = importlib.metadata.entry_points(group="console_scripts", name="transformers")
    sys.argv = ["transformers", *arguments]
    program.load()()


if __name__ == "__main__":
    main()
