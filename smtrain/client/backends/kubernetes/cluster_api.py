"""Calls to the API of a Kubernetes cluster, with the login of the official Python client
(`kubernetes`): kubeconfig, exec plugins such as `aws eks get-token`, or the service account of a pod.

Bodies and answers are JSON as the API has it, so that CRDs and newer fields need no classes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import quote, urlencode

from smtrain.core.config.kubernetes import Kubernetes
from smtrain.core.errors import JobError
from smtrain.core.extras import install
from smtrain.core.files import parse_json
from smtrain.core.text import clean_values

TIMEOUT_S = 30.0
_LOGIN = "run `kubectl get pods`, which shows if your login works, and set kubernetes.context"
_ASK = "ask the administrator of the cluster for this right"


class ClusterError(JobError):
    """An error of the API; `status` is HTTP's, `reason` the API's word, such as AlreadyExists."""

    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class ClusterLostError(ClusterError):
    """The API did not answer, or asks to try later."""


@dataclass(frozen=True)
class ClusterApi:
    """The API of the cluster that a section names."""

    section: Kubernetes

    @property
    def namespace(self) -> str:
        return self.section.namespace

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """One object, or one page of a list."""
        return self._call("GET", path, query)

    def items(self, path: str, **query: Any) -> Iterator[dict[str, Any]]:
        """All objects of a list, page by page, each once. A list that changed too much begins again:
        410 says so.
        """
        token, seen_uids = "", set[str]()
        while True:
            try:
                page = self.get(path, limit=500, **query, **({"continue": token} if token else {}))
            except ClusterError as error:
                if error.status != 410 or not token:
                    raise
                token = ""
                continue
            for item in page.get("items") or ():
                if (uid := (item.get("metadata") or {}).get("uid")) not in seen_uids:
                    yield item
                if uid:
                    seen_uids.add(uid)
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return

    def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._call("POST", path, {}, body)

    def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Change an object by a JSON merge patch."""
        return self._call("PATCH", path, {}, body, "application/merge-patch+json")

    def delete(self, path: str) -> None:
        """Delete an object with its dependents; does nothing if it does not exist."""
        try:
            self._call("DELETE", path, {"propagationPolicy": "Background"})
        except ClusterError as error:
            if error.status != 404:
                raise

    def text(self, path: str, **query: Any) -> str:
        """An answer without JSON, such as a log."""
        return self._send("GET", path, query).decode("utf-8", "replace")

    # ---- paths
    def core(self, kind: str, *names: str) -> str:
        """The path of objects of the core group in the namespace."""
        return "/".join(["/api/v1/namespaces", self.namespace, kind, *map(quote, names)])

    def group(self, group: str, kind: str, *names: str) -> str:
        """The path of objects of another group, such as batch/v1, in the namespace."""
        return "/".join([f"/apis/{group}/namespaces", self.namespace, kind, *map(quote, names)])

    # ---- within
    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        content = self._send(method, path, query, body, content_type)
        try:
            answer = parse_json(content)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ClusterLostError(f"{self._host} does not answer with JSON to {path}")
        clean_values(answer)
        return answer

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        from urllib3.exceptions import HTTPError, SSLError

        client = self._client
        headers = {"Accept": "application/json, */*", "Content-Type": content_type}
        login = client.configuration.auth_settings().get("BearerToken")
        if login and login["value"]:
            headers[login["key"]] = login["value"]
        address = f"{self._host}{path}" + (f"?{urlencode(query)}" if query else "")
        try:
            answer = client.rest_client.pool_manager.request(
                method,
                address,
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=TIMEOUT_S,
                retries=False,
            )
        except SSLError as error:  # no later attempt helps
            raise ClusterError(
                f"the cluster's API at {self._host} has another certificate than kubeconfig"
                f" expects ({error}); run `aws eks update-kubeconfig` again, or set"
                " kubernetes.context"
            ) from None
        except HTTPError as error:
            raise ClusterLostError(
                f"the cluster's API at {self._host} does not answer ({error}); check the network"
                " and kubernetes.context"
            ) from None
        content: bytes = answer.data
        if answer.status >= 400:
            raise _refusal(method, path, answer.status, content)
        return content

    @property
    def _host(self) -> str:
        return str(self._client.configuration.host).rstrip("/")

    @cached_property
    def _client(self) -> Any:
        try:
            from kubernetes import client, config
            from kubernetes.config import ConfigException
            from yaml import YAMLError
        except ImportError:
            raise JobError(
                "target kubernetes needs the Python package kubernetes;"
                f" `{install('k8s', 'kubernetes')}`"
            ) from None
        try:
            # The package reads the variable only when it is imported.
            file = os.environ.get("KUBECONFIG") or None
            return config.new_client_from_config(file, self.section.context)
        except (ConfigException, OSError, YAMLError) as error:
            if self.section.context is None:
                try:
                    config.load_incluster_config()
                    return client.ApiClient()
                except ConfigException:
                    pass
            raise ClusterError(self._no_access(config, file, error)) from None

    def _no_access(self, config: Any, file: str | None, error: Exception) -> str:
        """Explain why kubeconfig has no login."""
        context = self.section.context
        with suppress(Exception):  # the file cannot be read, which `error` says
            contexts, _ = config.list_kube_config_contexts(file)
            names = [context["name"] for context in contexts]
            if context and context not in names:
                names_text = ", ".join(names)
                return f"kubeconfig has no context {context}; set kubernetes.context to one of {names_text}"
        return f"kubeconfig gives no access ({error}); {_LOGIN}"


def _refusal(method: str, path: str, status: int, content: bytes) -> ClusterError:
    """The error of an answer, whose body is a `Status` of the API."""
    try:
        answer = parse_json(content)
        message, reason = str(answer["message"]), str(answer.get("reason", ""))
    except (ValueError, KeyError, TypeError):
        message, reason = content[:200].decode("utf-8", "replace") or f"HTTP {status}", ""
    if status == 429 or status >= 500:
        return ClusterLostError(
            f"the cluster cannot answer {method} {path} now ({message})", status, reason
        )
    is_unknown_user = status == 401 or "system:anonymous" in message
    remedies = {
        401: f"; {_LOGIN}",
        403: f"; {_LOGIN}" if is_unknown_user else f"; {_ASK}",
    }
    return ClusterError(f"{message}{remedies.get(status, '')}", status, reason)
