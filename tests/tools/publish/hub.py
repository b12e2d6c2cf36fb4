"""A stand-in for the hub's HTTP API: repositories, LFS uploads and commits, in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_a-token-that-may-write"
_COMMIT = re.compile(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/([^/?]+)")
_MODEL = re.compile(r"/api/models/([^/]+/[^/]+?)(?:/revision/([^/?]+))?(?:\?.*)?")


@dataclass
class Hub:
    """Content of the hub and its log of calls."""

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    uploads: list[str] = field(default_factory=list)
    """sha256 of every uploaded blob."""
    commits: list[str] = field(default_factory=list)
    breaks_after: int | None = None
    """Number of uploads after which uploads fail with status 500."""
    read_only: bool = False


class Handler(BaseHTTPRequestHandler):
    """The HTTP API, for the hub in `hub`."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, status: int, content: Any = None, **headers: str) -> None:
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = b""
        while size := int(self.rfile.readline(), 16):
            parts += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return parts

    def refused(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return False
        self.body()
        self.answer(401, {"error": "Invalid credentials"})
        return True

    def do_GET(self) -> None:
        if self.refused():
            return
        if self.path.startswith("/api/whoami"):
            self.answer(200, {"type": "user", "name": "me", "auth": {}})
            return
        match = _MODEL.fullmatch(self.path)
        if match is None or match[1] not in self.hub.files:
            self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return
        siblings: list[dict[str, Any]] = [{"rfilename": ".gitattributes", "size": 4}]
        for name, data in sorted(self.hub.files[match[1]].items()):
            digest = hashlib.sha256(data).hexdigest()
            lfs = {"lfs": {"sha256": digest, "size": len(data), "pointerSize": 130}}
            siblings.append(
                {"rfilename": name, "size": len(data), **(lfs if is_large(name) else {})}
            )
        self.answer(
            200,
            {"id": match[1], "sha": "0" * 40, "siblings": siblings, "private": True, "tags": []},
        )

    def do_POST(self) -> None:
        if self.refused():
            return
        body = self.body()
        if self.path == "/api/repos/create":
            request = json.loads(body)
            name = (
                f"{request['organization']}/{request['name']}"
                if request.get("organization")
                else f"me/{request['name']}"
            )
            if self.hub.read_only:
                self.answer(
                    403,
                    {"error": "You don't have the rights to create a model under this namespace"},
                )
                return
            self.hub.files.setdefault(name, {})
            self.hub.private[name] = bool(
                request.get("private") or request.get("visibility") == "private"
            )
            self.answer(200, {"url": f"{self.hub.url}/{name}", "name": name})
        elif self.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = []
            for one in json.loads(body)["objects"]:
                to = {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}
                objects.append({**one, **({} if one["oid"] in self.hub.blobs else {"actions": to})})
            self.answer(200, {"transfer": "basic", "objects": objects})
        elif match := _COMMIT.match(self.path):
            (self.preupload if match[2] == "preupload" else self.commit)(match[1], body)
        else:
            self.answer(404, {"error": self.path})

    def preupload(self, repository: str, body: bytes) -> None:
        files = json.loads(body)["files"]
        modes = [
            {"path": f["path"], "uploadMode": "lfs" if is_large(f["path"]) else "regular"}
            for f in files
        ]
        self.answer(200, {"files": [{**one, "shouldIgnore": False, "oid": None} for one in modes]})

    def commit(self, repository: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.hub.commits.append(value["summary"])
            elif line["key"] == "file":
                self.hub.files[repository][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.hub.files[repository][value["path"]] = self.hub.blobs[value["oid"]]
        url = f"{self.hub.url}/{repository}/commit/{'1' * 40}"
        self.answer(
            200, {"success": True, "commitOid": "1" * 40, "commitUrl": url, "hookOutput": ""}
        )

    def do_PUT(self) -> None:
        data = self.body()
        if self.hub.breaks_after is not None and len(self.hub.uploads) >= self.hub.breaks_after:
            self.answer(400, {"error": "the line is down"})
            return
        digest = hashlib.sha256(data).hexdigest()
        self.hub.blobs[digest] = data
        self.hub.uploads.append(digest)
        self.answer(200, {})


@contextmanager
def hub() -> Iterator[Hub]:
    """A hub on a free port."""
    held = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": held}))
    held.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield held
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def is_large(name: str) -> bool:
    """True if the hub keeps such a file in LFS."""
    return name.endswith(".safetensors")
