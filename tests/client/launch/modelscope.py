"""ModelScope on 127.0.0.1 with one model: its list of files, and the files, which it redirects to
another host for.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

OLD, NEW = "a" * 40, "b" * 40
"""The commits: the second changed README.md, all else is of the first."""


class ModelScope:
    """Serves the files of a folder to every request with `token` (None: to all).

    Weights come from a second address.

    `breaks` answers with part of a file end before all of it has come, and `other` names a file
    that arrives with other bytes than listed.
    """

    def __init__(self, folder: Path, name: str, token: str | None = None) -> None:
        self.folder, self.name, self.token = folder, name, token
        self.breaks, self.other = 0, ""
        self.asked: list[tuple[str, str]] = []
        """(commit, file) of each download."""
        self.ranges: list[str] = []
        self.store_was_told: set[str] = set()
        """Whatever the second address was told of a token."""
        served = self

        class Site(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        class Store(Site):
            def do_GET(self) -> None:
                served.store_was_told |= {
                    self.headers[key] for key in ("Authorization", "Cookie") if self.headers[key]
                }
                served.send(self, served.folder / unquote(self.path[1:]))

        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for handler in (Site, Store)]
        self.url, self.store = (f"http://127.0.0.1:{server.server_port}" for server in self.servers)
        for server in self.servers:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(request.path)
        said = {key: value[0] for key, value in parse_qs(parts.query).items()}
        api = f"/api/v1/models/{self.name}/repo"
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            request.send_error(403, "Forbidden")
        elif parts.path == f"{api}/files" and said["Revision"] in ("master", "v1", NEW):
            body = json.dumps(
                {"Code": 200, "Success": True, "Data": {"Files": self.listing()}}
            ).encode()
            request.send_response(200)
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)
        elif parts.path == api and (file := self.folder / said["FilePath"]).is_file():
            self.asked.append((said["Revision"], said["FilePath"]))
            if file.suffix == ".safetensors":
                request.send_response(302)
                request.send_header("Location", f"{self.store}/{said['FilePath']}")
                request.end_headers()
            else:
                self.send(request, file)
        else:
            request.send_error(404, "Not Found")

    def listing(self) -> list[dict[str, object]]:
        found = []
        for path in sorted(self.folder.rglob("*")):
            readme = path.name == "README.md"
            data = path.read_bytes() if path.is_file() else b""
            found.append(
                {
                    "Name": path.name,
                    "Path": path.relative_to(self.folder).as_posix(),
                    "Size": len(data),
                    "Type": "blob" if path.is_file() else "tree",
                    "Revision": NEW if readme else OLD,
                    "CommittedDate": 1_700_000_001 if readme else 1_700_000_000,
                    "Sha256": hashlib.sha256(data).hexdigest() if path.is_file() else "",
                }
            )
        return found

    def send(self, request: BaseHTTPRequestHandler, file: Path) -> None:
        data = file.read_bytes() if file.name != self.other else bytes(file.stat().st_size)
        start = 0
        if found := re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range") or ""):
            self.ranges.append(file.name)
            start = int(found[1])
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(data) - start))
        request.end_headers()
        if self.breaks:
            self.breaks -= 1
            request.wfile.write(data[start : start + (len(data) - start) // 2])
        else:
            request.wfile.write(data[start:])
