"""A Hugging Face hub on 127.0.0.1 with one model or data set, gated or not: the few answers that
snapshot_download, `datasets` and HfFileSystem ask for.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONVERTED = "fedcba9876543210fedcba9876543210fedcba98"
"""The commit of the branch refs/convert/parquet."""


class Hub:
    """Serves the files of `model` as model `name`, those of `data` as a data set of that name, to
    every request with `token` (None: to all).

    `busy` requests for parts of files are told to come again at once. With `moves` a request for
    the head is told another commit each time, of the same files; `read` are the commits that files
    were asked of. `converted` holds the files of the branch refs/convert/parquet.
    """

    def __init__(
        self,
        model: Path,
        name: str,
        token: str | None = None,
        *,
        data: Path | None = None,
        converted: Path | None = None,
    ) -> None:
        self.converted = converted
        self.folders, self.name, self.token = (
            {"models": model, "datasets": data or model},
            name,
            token,
        )
        self.busy = 0
        self.moves = False
        self.commits = [COMMIT]
        self.read: set[str] = set()
        self.ranges: list[str] = []
        self.tokens: set[str | None] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        brought = (request.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        path = unquote(request.path.partition("?")[0])
        sent = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if self.name in path:
            self.tokens.add(brought)
        path = path.replace("refs/convert/parquet", CONVERTED)
        named = next(
            (part for part in re.split("[/?]", path) if part in (*self.commits, CONVERTED)), None
        )
        if named is None and self.moves:
            self.commits.append(hashlib.sha1(str(len(self.commits)).encode()).hexdigest())
        commit = named or self.commits[-1]
        kind = "datasets" if path.startswith(("/datasets/", "/api/datasets/")) else "models"
        folder, api = self.folders[kind], f"/api/{kind}/{self.name}"
        if named == CONVERTED and self.converted:
            folder = self.converted
        resolved = f"{'/datasets' if kind == 'datasets' else ''}/{self.name}/resolve/{commit}/"
        below = folder / path.partition(f"/tree/{commit}")[2].strip("/")
        ranged = request.headers.get("Range", "") if resolved in path else ""
        headers = {"X-Repo-Commit": commit}
        if brought != self.token:
            status, data = 401, b'{"error": "gated"}'
            headers |= {
                "X-Error-Code": "GatedRepo",
                "X-Error-Message": "Access to this model is restricted.",
            }
        elif ranged and self.busy:
            self.busy -= 1
            status, data = 429, b"{}"
            headers["Retry-After"] = "0"
        elif path == api or path.startswith(f"{api}/revision/"):
            there = sorted(file for file in folder.rglob("*") if file.is_file())
            files = [{"rfilename": file.relative_to(folder).as_posix()} for file in there]
            status, data = (
                200,
                json.dumps({"id": self.name, "sha": commit, "siblings": files}).encode(),
            )
        elif path.startswith((f"{api}/tree/", f"{api}/paths-info/")) and below.is_dir():
            if sent:
                listed = [folder / name for name in parse_qs(sent.decode())["paths"]]
            else:
                listed = sorted(
                    below.iterdir()
                    if "recursive=false" in request.path.lower()
                    else below.rglob("*")
                )
            rows = [
                (
                    {
                        "type": "file",
                        "path": str(one.relative_to(folder)),
                        "size": one.stat().st_size,
                        "oid": "0",
                    }
                    if one.is_file()
                    else {"type": "directory", "path": str(one.relative_to(folder)), "oid": "0"}
                )
                for one in listed
                if one.exists()
            ]
            status, data = 200, json.dumps(rows).encode()
        elif path.startswith(resolved) and (file := folder / path[len(resolved) :]).is_file():
            status, data = 200, file.read_bytes()
            self.read.add(commit)
            headers["ETag"] = f'"{hashlib.sha1(data).hexdigest()}"'
            if found := re.fullmatch(r"bytes=(\d+)-(\d+)", ranged):
                status, data = 206, data[int(found[1]) : int(found[2]) + 1]
                self.ranges.append(path[len(resolved) :])
        else:
            status, data = 404, b"{}"
            headers["X-Error-Code"] = "EntryNotFound" if self.name in path else "RepoNotFound"
        request.send_response(status)
        for key, value in {
            **headers,
            "Content-Length": str(len(data)),
            "Content-Type": "application/json",
        }.items():
            request.send_header(key, value)
        request.end_headers()
        if body:
            request.wfile.write(data)
