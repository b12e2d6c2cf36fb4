"""A stand-in for a Kubernetes cluster: the API server on 127.0.0.1 without etcd, whose pods are
processes of this machine.

It is ours: it answers what the official Python client and kubectl ask, in the form of the API
reference of 1.31 (https://kubernetes.io/docs/reference/kubernetes-api/): discovery, lists in pages,
watches with versions and 410 Gone, logs with follow and timestamps, merge patches, deletion with a
grace period, conditions and events.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from testing.kubernetes_jobs import Controllers
from testing.kubernetes_operators import AGENT, check_references
from testing.kubernetes_store import CLUSTER_WIDE, KINDS, RefusedError, Store

TOKEN = "stand-in"
ISSUER = "https://oidc.eks.us-east-1.amazonaws.com/id/0123456789ABCDEF"
STEP_SECONDS = 0.05


class StandInCluster:
    """The cluster. `with StandInCluster(folder, image, ports) as cluster:` starts it; what still
    runs at the end is killed.
    """

    def __init__(self, root: Path, image: Mapping[str, str], ports: Iterator[int]) -> None:
        """`image`: the environment of every image; `ports`: free ones."""
        self.root, self._ports = root, ports
        self.image = {**image, "PATH": f"{root}/bin:{image['PATH']}"}
        self.store = Store()
        self.controllers = Controllers(self)
        self.missing_images: set[str] = set()
        self.forbidden: set[tuple[str, str]] = set()
        """(verb, plural) that the user may not do."""
        self.began: dict[str, float] = {}
        self.asked: list[tuple[str, str]] = []
        """Method and path of every call."""
        self.cut_after: int | None = None
        """Cut each watch and followed log after so many lines."""
        self.connections: set[socket.socket] = set()
        """Open connections, which end with the server."""
        self._port_of: dict[tuple[str, str], int] = {}
        self._ended = threading.Event()
        (root / "bin").mkdir(parents=True)
        (root / "bin/hyperpodrun").write_text(AGENT)
        (root / "bin/hyperpodrun").chmod(0o755)
        self.store.create("namespaces", "", {"metadata": {"name": "default"}, "status": {}})
        self.kubeconfig = root / "kubeconfig"
        self._port = 0
        self._certificate = root / "server.pem"
        self._certificate.write_bytes(make_certificate())

    def __enter__(self) -> StandInCluster:
        self.serve()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for process in self.controllers.processes.values():
            process.kill()
        self.down()

    def serve(self) -> None:
        """Start the API server, on the port that it had."""
        handler = type("Handler", (_Handler,), {"cluster": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        self._server.daemon_threads = True
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self._certificate)
        self._server.socket = tls.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self._port = self._server.server_address[1]
        self._serving = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._serving.start()
        self.kubeconfig.write_text(yaml.safe_dump(self._config()))

    def down(self) -> None:
        """Stop the API server; pods run on."""
        self._server.shutdown()
        self._server.server_close()
        self._serving.join()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _config(self) -> dict[str, Any]:
        authority = base64.b64encode(
            self._certificate.read_bytes().partition(b"-----BEGIN PRIV")[0]
        )
        server = f"https://127.0.0.1:{self._port}"
        context = {"cluster": "stand-in", "user": "me", "namespace": "default"}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "stand-in",
            "clusters": [
                {
                    "name": "stand-in",
                    "cluster": {"server": server, "certificate-authority-data": authority.decode()},
                }
            ],
            "users": [{"name": "me", "user": {"token": TOKEN}}],
            "contexts": [{"name": "stand-in", "context": context}],
        }

    def add_node(self, name: str, labels: Mapping[str, str] | None = None, **room: int) -> None:
        """Add a node with resources, by Kubernetes' names."""
        allocatable = {"pods": "110", **{key: str(value) for key, value in room.items()}}
        body = {"metadata": {"name": name, "labels": dict(labels or {})}, "spec": {}}
        self.store.create("nodes", "", {**body, "status": {"allocatable": allocatable}})

    def claim(self, name: str) -> Path:
        """The folder of a volume, which is made."""
        folder = self.root / "claims" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder.resolve()

    def port_of(self, labels: Mapping[str, str], name: str) -> int:
        """The port of a job that a variable names."""
        key = (str(labels.get("smtrain.io/job")), name)
        if key not in self._port_of:
            self._port_of[key] = next(self._ports)
        return self._port_of[key]

    def delete(self, plural: str, namespace: str, name: str, grace: float | None) -> dict[str, Any]:
        """Delete an object with its dependents; a pod after its grace period."""
        with self.store.changed:
            item = self.store.get(plural, namespace, name)
            if plural == "pods":
                self.controllers.terminate(item, grace)
                return item
            self.store.delete(plural, namespace, name)
            for of, item_namespace, owned_item in self.store.owned_by(item["metadata"]["uid"]):
                self.delete(of, item_namespace, owned_item, grace)
            return item

    def _work(self) -> None:
        while not self._ended.wait(STEP_SECONDS):
            self.controllers.step()


class _Handler(BaseHTTPRequestHandler):
    cluster: StandInCluster
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.cluster.connections.add(self.connection)

    def finish(self) -> None:
        self.cluster.connections.discard(self.connection)
        with contextlib.suppress(OSError):  # the client or `down` has closed it
            super().finish()

    def log_message(self, *_: object) -> None:
        """Nothing: the calls are in `StandInCluster.asked`."""

    def _serve(self) -> None:
        address = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(address.query, True).items()}
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.cluster.asked.append((self.command, self.path))
        try:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise RefusedError(401, "Unauthorized", "Unauthorized")
            body = yaml.safe_load(text) if text else {}
            self._route([unquote(part) for part in address.path.strip("/").split("/")], query, body)
        except RefusedError as error:
            self._send(error.args[0], status_of(*error.args))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815

    def _send(self, status: int, answer: Any) -> None:
        content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        kind = "text/plain" if isinstance(answer, str) else "application/json"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _route(self, parts: list[str], query: dict[str, str], body: dict[str, Any]) -> None:
        match parts:
            case ["version"]:
                self._send(200, {"major": "1", "minor": "31", "gitVersion": "v1.31.0"})
            case [".well-known", "openid-configuration"]:
                self._send(200, {"issuer": ISSUER})
            case ["api"]:
                self._send(200, {"kind": "APIVersions", "versions": ["v1"]})
            case ["apis"]:
                self._send(200, _groups())
            case ["api", "v1"]:
                self._send(200, _resources("v1"))
            case ["apis", group, version]:
                self._send(200, _resources(f"{group}/{version}"))
            case ["apis", "authorization.k8s.io", "v1", "selfsubjectaccessreviews"]:
                attributes = body["spec"]["resourceAttributes"]
                is_allowed = (
                    attributes["verb"],
                    attributes["resource"],
                ) not in self.cluster.forbidden
                self._send(201, {**body, "status": {"allowed": is_allowed}})
            case ["api", "v1", *rest] | ["apis", _, _, *rest]:
                self._object(rest, query, body)
            case _:
                raise RefusedError(
                    404, "NotFound", "the server could not find the requested resource"
                )

    def _object(self, parts: list[str], query: dict[str, str], body: dict[str, Any]) -> None:
        namespace = ""
        if parts[0] == "namespaces" and len(parts) > 2:
            namespace, parts = parts[1], parts[2:]
        plural, name, sub = [*parts, "", ""][:3]
        store = self.cluster.store
        if plural not in KINDS:
            raise RefusedError(404, "NotFound", "the server could not find the requested resource")
        verb = {"GET": "get" if name else "list", "POST": "create", "DELETE": "delete"}.get(
            self.command, "patch"
        )
        if (verb, plural) in self.cluster.forbidden:
            raise RefusedError(
                403,
                "Forbidden",
                f'{plural} is forbidden: User "me" cannot {verb} resource "{plural}" in the'
                f' namespace "{namespace}"',
            )
        if namespace and store.find("namespaces", "", namespace) is None:
            raise RefusedError(404, "NotFound", f'namespaces "{namespace}" not found')
        if self.command == "POST":
            if query.get("dryRun"):
                self._send(201, body)
                return
            check_references(store, plural, namespace, body)
            body.setdefault("status", {"phase": "Pending"} if plural == "pods" else {})
            self._send(201, store.create(plural, namespace, body))
        elif self.command in ("PATCH", "PUT"):
            self._send(200, store.patch(plural, namespace, name, body))
        elif self.command == "DELETE":
            grace_seconds = (body or {}).get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
            grace = None if grace_seconds is None else float(grace_seconds)
            self._send(200, self.cluster.delete(plural, namespace, name, grace))
        elif sub == "log":
            self._log(store.get("pods", namespace, name), query)
        elif name:
            self._send(200, store.get(plural, namespace, name))
        elif query.get("watch") in ("1", "true", "True"):
            self._watch(plural, namespace, query)
        else:
            self._list(plural, namespace, query)

    def _list(self, plural: str, namespace: str, query: dict[str, str]) -> None:
        store = self.cluster.store
        with store.changed:
            items = store.select(plural, namespace, **_selectors(query))
            version, kind = KINDS[plural]
            metadata: dict[str, Any] = {"resourceVersion": str(store.version)}
        if token := query.get("continue"):
            of, _, at = token.partition(":")
            if int(of) < store.oldest:
                raise RefusedError(410, "Expired", "The provided continue parameter is too old")
            metadata["resourceVersion"], items = of, items[int(at) :]
        else:
            at = "0"
        if (limit := int(query.get("limit") or 0)) and len(items) > limit:
            items = items[:limit]
            metadata["continue"] = f"{metadata['resourceVersion']}:{int(at) + limit}"
        answer = {"apiVersion": version, "kind": f"{kind}List", "metadata": metadata}
        self._send(200, {**answer, "items": items})

    def _stream(self, kind: str, lines: Iterator[str]) -> None:
        """Send lines as they come, in chunks; some are cut off in the middle."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, line in enumerate(lines):
            content = line.encode()
            if number == self.cluster.cut_after:
                self.wfile.write(f"{len(content):x}\r\n".encode() + content[: len(content) // 2])
                self.close_connection = True
                return
            if content:
                self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
                self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _watch(self, plural: str, namespace: str, query: dict[str, str]) -> None:
        store = self.cluster.store
        version = int(query.get("resourceVersion") or store.version)
        deadline = time.monotonic() + float(query.get("timeoutSeconds") or 300)

        def lines() -> Iterator[str]:
            try:
                for event in store.watch(plural, namespace, version, **_selectors(query)):
                    if event:
                        yield json.dumps(event) + "\n"
                    elif time.monotonic() > deadline or self.cluster._ended.is_set():
                        return
            except RefusedError as error:
                yield json.dumps({"type": "ERROR", "object": status_of(*error.args)}) + "\n"

        self._stream("application/json", lines())

    def _log(self, pod: dict[str, Any], query: dict[str, str]) -> None:
        process = self.cluster.controllers.processes.get(pod["metadata"]["uid"])
        if process is None:
            name = pod["metadata"]["name"]
            raise RefusedError(400, "BadRequest", f'container in pod "{name}" is waiting to start')
        since = 0.0
        if text := query.get("sinceTime"):
            since = datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
        elif seconds := query.get("sinceSeconds"):
            since = time.time() - float(seconds)
        tail = int(query["tailLines"]) if "tailLines" in query else None
        with_times = query.get("timestamps") in ("true", "True", "1")

        def line(at: float, text: str) -> str:
            moment = datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="microseconds")
            return (f"{moment.replace('+00:00', '000Z')} " if with_times else "") + text + "\n"

        if query.get("follow") in ("true", "True", "1"):
            self._stream("text/plain", (line(*item) for item in process.follow(since)))
            return
        self._send(200, "".join(line(*item) for item in process.log(since, tail)))


def make_certificate() -> bytes:
    """A certificate for 127.0.0.1 that signs itself, and its key, as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key, issue_time = ec.generate_private_key(ec.SECP256R1()), datetime.now(timezone.utc)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "stand-in")])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    builder = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(issue_time - timedelta(days=1))
        .not_valid_after(issue_time + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    )
    text = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    return text + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def status_of(code: int, reason: str, message: str) -> dict[str, Any]:
    """A `Status` of the API about a failure."""
    words = {"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure"}
    return {**words, "message": message, "reason": reason, "code": code}


def _selectors(query: Mapping[str, str]) -> dict[str, str]:
    names = {"labelSelector": "label_selector", "fieldSelector": "field_selector"}
    return {names[key]: query[key] for key in names if key in query}


def _groups() -> dict[str, Any]:
    versions = sorted({version for version, _ in KINDS.values() if "/" in version})
    versions.append("authorization.k8s.io/v1")
    groups = []
    for group_version in versions:
        group, _, version = group_version.partition("/")
        entry = {"groupVersion": group_version, "version": version}
        groups.append({"name": group, "versions": [entry], "preferredVersion": entry})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def _resources(group_version: str) -> dict[str, Any]:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = []
    for plural, (version, kind) in KINDS.items():
        if version == group_version:
            names = {"name": plural, "singularName": kind.lower(), "kind": kind, "verbs": verbs}
            resources.append({**names, "namespaced": plural not in CLUSTER_WIDE})
    if group_version == "v1":
        log = {"name": "pods/log", "singularName": "", "kind": "Pod", "verbs": ["get"]}
        resources.append({**log, "namespaced": True})
    if not resources and not group_version.startswith("authorization"):
        raise RefusedError(404, "NotFound", "the server could not find the requested resource")
    head = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version}
    return {**head, "resources": resources}
