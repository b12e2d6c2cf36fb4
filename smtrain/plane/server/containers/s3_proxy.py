"""The control plane's S3 for the containers of one job, at the address that their network has on this machine.

The control plane itself listens on 127.0.0.1, which a container does not reach, and answers its owner everything. Here
it answers what a training job's role may ask on AWS: S3, and who it is.
"""

from __future__ import annotations

import threading
from typing import Any
from urllib.parse import parse_qs

from smtrain.core.errors import LocalError

SERVICES = ("s3", "sts")


class Door:
    """A server of its own thread on `host`, any port; `app` is what stands behind it."""

    def __init__(self, app: Any, host: str) -> None:
        from werkzeug.serving import make_server

        from smtrain.plane.server.guard import QuietHandler

        try:
            self._server = make_server(host, 0, _Narrow(app, host), threaded=True, request_handler=QuietHandler)
        except (OSError, SystemExit):
            raise LocalError(
                f"the network of the job's containers has the address {host}, which is not one of this machine (Docker "
                "in a virtual machine, or without root), so they could not reach S3: set network.isolation, or leave "
                "out local.run_in"
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
    """WSGI middleware that lets the services of a job's role through."""

    def __init__(self, app: Any, host: str) -> None:
        self.app, self.host = app, host

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if _service(environ) not in SERVICES:
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"a container of smtrain's local control plane is answered by S3 alone"]
        environ["smtrain.host"] = self.host
        return self.app(environ, start_response)


def _service(environ: dict[str, Any]) -> str:
    """The service that a signed request is for; S3 for links with its old signature."""
    query = parse_qs(environ.get("QUERY_STRING", ""))
    given = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition(",")[0]
    scope = (given or query.get("X-Amz-Credential", [""])[0]).split("/")
    if len(scope) == 5:
        return str(scope[3])
    return "s3" if "Signature" in query and not environ.get("HTTP_AUTHORIZATION") else ""
