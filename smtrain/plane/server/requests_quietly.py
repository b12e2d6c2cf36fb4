"""moto's request handler without a line for every request."""

from __future__ import annotations

from typing import Any

from moto.moto_server.werkzeug_app import MotoRequestHandler


class QuietHandler(MotoRequestHandler):
    """Answers, and says nothing of it."""

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        pass
