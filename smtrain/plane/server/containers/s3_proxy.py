"""The control plane's S3 and STS for the containers of one job, at their network's address on this
machine.

The control plane itself listens on 127.0.0.1, which a container does not reach, and answers every
call of its owner.
"""

from __future__ import annotations

import threading
from typing import Any

from smtrain.core.errors import LocalError
from smtrain.plane.server.operations import service_of

SERVICES = ("s3", "sts")


class S3Proxy:
    """A server thread on `host`, at any port, in front of the application `app`."""

    def __init__(self, app: Any, host: str) -> None:
        from werkzeug.serving import make_server

        from smtrain.plane.server.guard import QuietHandler

        try:
            self._server = make_server(
                host, 0, _Narrow(app, host), threaded=True, request_handler=QuietHandler
            )
        except (OSError, SystemExit):
            raise LocalError(
                f"the network of the job's containers has the address {host}, which is not one of"
                " this machine (Docker in a virtual machine, or without root), so they could not"
                " reach S3: set network.isolation, or leave out local.run_in"
            ) from None
        self.host = host
        self.url = f"http://{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Narrow:
    """WSGI middleware that passes only the services of a job's role."""

    def __init__(self, app: Any, host: str) -> None:
        self.app, self.host = app, host

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if service_of(environ) not in SERVICES:
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"a container of smtrain's local control plane is answered by S3 only"]
        environ["smtrain.host"] = self.host
        return self.app(environ, start_response)
