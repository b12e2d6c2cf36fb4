"""A Hugging Face hub on 127.0.0.1 with one model, gated or not: the few answers that snapshot_download asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves the files of `folder` as model `name` to whoever brings `token` (None: to all)."""

    def __init__(self, folder: Path, name: str, token: str | None = None) -> None:
        self.folder, self.name, self.token = folder, name, token
        self.tokens: set[str | None] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def files(self) -> list[Path]:
        return sorted(file for file in self.folder.rglob("*") if file.is_file())

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        brought = (request.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        path = request.path.partition("?")[0]
        if self.name in path:
            self.tokens.add(brought)
        resolved = f"/{self.name}/resolve/{COMMIT}/"
        headers = {"X-Repo-Commit": COMMIT}
        if brought != self.token:
            status, data = 401, b'{"error": "gated"}'
            headers |= {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to this model is restricted."}
        elif path.startswith(f"/api/models/{self.name}/revision/"):
            files = [{"rfilename": file.relative_to(self.folder).as_posix()} for file in self.files()]
            status, data = 200, json.dumps({"id": self.name, "sha": COMMIT, "siblings": files}).encode()
        elif path.startswith(f"/api/models/{self.name}/tree/"):
            rows = [
                {"type": "file", "path": str(file.relative_to(self.folder)), "size": file.stat().st_size, "oid": "0"}
                for file in self.files()
            ]
            status, data = 200, json.dumps(rows).encode()
        elif path.startswith(resolved) and (file := self.folder / path[len(resolved) :]).is_file():
            status, data = 200, file.read_bytes()
            headers["ETag"] = f'"{hashlib.sha1(data).hexdigest()}"'
        else:
            status, data = 404, b"{}"
            headers["X-Error-Code"] = "RepoNotFound"
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data)), "Content-Type": "application/json"}.items():
            request.send_header(key, value)
        request.end_headers()
        if body:
            request.wfile.write(data)
