"""Speak to Alibaba Cloud: the API of PAI-DLC, and OSS, by its own SDKs (extra pai)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from smtrain.client.backends.base import Body, size_of
from smtrain.client.backends.checksums import blocks_of, etag_of
from smtrain.client.backends.sagemaker.calls import PERSIST_S
from smtrain.client.backends.sagemaker.retry import Patience, retry_while_lost
from smtrain.core.config.pai import Pai
from smtrain.core.config.units import spell_bytes
from smtrain.core.errors import JobError
from smtrain.core.extras import missing_module
from smtrain.core.protocol.uris import split_uri
from smtrain.core.text import Say

_CONNECT_MS, _READ_MS = 5_000, 60_000
_ANSWER_S = 20.0
"""Total time to repeat a call of OSS other than a transfer."""
_PARTS_FROM = 100 << 20
"""Bytes from which a file is sent and read in parts, which can be continued after a break."""
_BUSY = (408, 429, 500, 502, 503, 504)
_Some = TypeVar("_Some")


class CloudError(JobError):
    """Alibaba Cloud has refused a call, or cannot be called."""


class CloudLostError(CloudError):
    """Alibaba Cloud does not answer, or is busy; a later call may succeed."""


class ObjectTakenError(CloudError):
    """An object that should be new exists."""


@dataclass(frozen=True)
class Cloud:
    """The services of a region with the caller's credentials, which its default chain finds."""

    section: Pai

    # ---- PAI-DLC
    def create(self, request: Mapping[str, Any]) -> str:
        """Create a job; returns its ID. Raises `CloudError`."""
        models = self._models
        sdk_request = models.CreateJobRequest().from_map(dict(request))
        if unknown_keys := sorted(_keys(request) - _keys(sdk_request.to_map())):
            raise CloudError(
                "the installed alibabacloud-pai-dlc20201203 does not know"
                f" {', '.join(unknown_keys)} of CreateJob; update it"
            )
        return str(self._ask("create_job", sdk_request)["JobId"])

    def job(self, id_: str) -> dict[str, Any]:
        """GetJob's answer."""
        sdk_request = self._models.GetJobRequest(need_detail=True)
        return self._ask("get_job", id_, sdk_request)

    def jobs(self, contains: str | None, size: int) -> Iterator[list[dict[str, Any]]]:
        """Pages of the workspace's jobs whose name contains a text, newest first."""
        number, job_count = 1, 0
        while True:
            sdk_request = self._models.ListJobsRequest(
                workspace_id=self.section.workspace,
                display_name=contains,
                sort_by="GmtCreateTime",
                order="desc",
                page_number=number,
                page_size=size,
            )
            answer = self._ask("list_jobs", sdk_request)
            page = list(answer.get("Jobs") or ())
            yield page
            number, job_count = number + 1, job_count + len(page)
            if not page or job_count >= int(answer.get("TotalCount") or 0):
                return

    def stop(self, id_: str) -> None:
        """Ask a job to end."""
        self._ask("stop_job", id_)

    def lines(
        self, id_: str, pod: str, uid: str | None, start: str, end: str, max_lines: int
    ) -> list[str]:
        """At most so many lines of a pod between two times (ISO 8601, UTC, whole seconds)."""
        sdk_request = self._models.GetPodLogsRequest(
            max_lines=max_lines, start_time=start, end_time=end, pod_uid=uid
        )
        answer = self._ask("get_pod_logs", id_, pod, sdk_request)
        return [str(line) for line in answer.get("Logs") or ()]

    def types(self) -> set[str]:
        """The types of public resources that the region offers."""
        instance_types: set[str] = set()
        number = 1
        while True:
            sdk_request = self._models.ListEcsSpecsRequest(page_number=number, page_size=100)
            answer = self._ask("list_ecs_specs", sdk_request)
            specs = answer.get("EcsSpecs") or ()
            instance_types |= {str(spec.get("InstanceType")) for spec in specs}
            number += 1
            if not specs or len(instance_types) >= int(answer.get("TotalCount") or 0):
                return instance_types

    @cached_property
    def _models(self) -> Any:
        try:
            from alibabacloud_pai_dlc20201203 import models
        except ImportError:
            raise CloudError(missing_module("alibabacloud_pai_dlc20201203")) from None
        return models

    @cached_property
    def _dlc(self) -> Any:
        from alibabacloud_pai_dlc20201203.client import Client
        from alibabacloud_tea_openapi.utils_models import Config

        region = self.section.region or ""
        scheme, _, host = (self.section.endpoint or f"pai-dlc.{region}.aliyuncs.com").rpartition(
            "://"
        )
        return Client(
            Config(
                credential=self._credentials,
                region_id=region,
                endpoint=host,
                protocol=(scheme or "https").upper(),
            )
        )

    @cached_property
    def _credentials(self) -> Any:
        """The first of: ALIBABA_CLOUD_ACCESS_KEY_ID and _SECRET, OIDC, the profile of `aliyun`, the
        role of an ECS.
        """
        try:
            from alibabacloud_credentials.client import Client
            from alibabacloud_credentials.exceptions import CredentialException
        except ImportError:
            raise CloudError(missing_module("alibabacloud_pai_dlc20201203")) from None
        client, log = (
            Client(),
            logging.getLogger("credentials"),
        )  # the SDK's, which prints a traceback for each try
        level = log.level
        log.setLevel(logging.CRITICAL)
        try:
            client.get_credential()
        except CredentialException:
            raise CloudError(
                "no credentials for Alibaba Cloud were found; run `aliyun configure`, or set "
                "ALIBABA_CLOUD_ACCESS_KEY_ID and ALIBABA_CLOUD_ACCESS_KEY_SECRET"
            ) from None
        finally:
            log.setLevel(level)
        return client

    def _ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        """The body of an answer of PAI-DLC; `method` is the SDK's."""
        self._models  # noqa: B018 - raises if the SDK is missing
        from darabonba.exceptions import DaraException
        from darabonba.runtime import RuntimeOptions
        from requests import RequestException
        from Tea.exceptions import TeaException, UnretryableException

        options = RuntimeOptions(connect_timeout=_CONNECT_MS, read_timeout=_READ_MS)
        call, send = method.title().replace("_", ""), getattr(self._dlc, f"{method}_with_options")
        try:
            answer: dict[str, Any] = send(*arguments, {}, options).body.to_map()
        except UnretryableException as error:
            raise self._lost_error(call, error) from None
        except (DaraException, TeaException) as error:
            status = int(
                getattr(error, "status_code", None) or getattr(error, "statusCode", None) or 0
            )
            message = f"{error.code}: {error.message}".strip(": ")
            if status in _BUSY or "Throttling" in str(error.code) or not status:
                raise self._lost_error(call, message) from None
            raise CloudError(f"PAI-DLC has refused {call} ({message})") from None
        except (RequestException, OSError) as error:
            raise self._lost_error(call, error) from None
        return answer

    def _lost_error(self, call: str, reason: object) -> CloudLostError:
        return CloudLostError(
            f"{call}: Alibaba Cloud does not answer in {self.section.region}"
            f" ({str(reason).splitlines()[0][:200]}); check the network, the proxy and pai.region"
        )

    # ---- OSS
    def listing(self, uri: str) -> list[dict[str, Any]]:
        """Key, Size and ETag of everything below a URI, or of the object of exactly this name.

        OSS matches beginnings of keys, so `data` would match `data2/x` too; PAI mounts folders.
        """
        import_oss()
        import oss2

        bucket, prefix = split_uri(uri)
        folder = f"{prefix}/" if prefix and not prefix.endswith("/") else prefix
        return self._store(
            f"list {uri}",
            lambda: [
                {"Key": item.key, "Size": item.size, "ETag": f'"{item.etag.lower()}"'}
                for item in oss2.ObjectIteratorV2(
                    self._bucket(bucket), prefix=prefix, max_keys=1000
                )
                if not item.key.endswith("/")
                and (item.key == prefix or item.key.startswith(folder))
            ],
        )

    def read(self, uri: str) -> bytes:
        """One object. Raises `CloudError` if it does not exist or may not be read."""
        bucket, key = split_uri(uri)
        content: bytes = self._store(
            f"read {uri}", lambda: self._bucket(bucket).get_object(key).read()
        )
        return content

    def fetch(self, bucket: str, key: str, path: Path) -> None:
        """Copy one object here; a large one continues after a break."""
        import_oss()
        import oss2

        self._store(
            f"read {bucket}/{key}",
            lambda: oss2.resumable_download(
                self._bucket(bucket), key, str(path), multiget_threshold=_PARTS_FROM
            ),
            PERSIST_S,
        )

    def claim(self, uri: str, content: bytes) -> None:
        """Write an object that must be new. Raises `ObjectTakenError` if it exists."""
        bucket, key = split_uri(uri)
        new = {"x-oss-forbid-overwrite": "true"}
        self._store(
            f"write {uri}", lambda: self._bucket(bucket).put_object(key, content, headers=new)
        )

    def remove(self, uri: str) -> None:
        """Delete an object; it need not exist."""
        bucket, key = split_uri(uri)
        self._store(f"delete {uri}", lambda: self._bucket(bucket).delete_object(key))

    def put(self, uri: str, files: Sequence[tuple[str, Body]], say: Say) -> None:
        """Copy files below a URI unless they are there with the same content."""
        import_oss()
        import oss2

        bucket, prefix = split_uri(uri)
        remote_objects = {item["Key"]: item for item in self.listing(uri)}
        missing_files = [
            (name, body)
            for name, body in files
            if (item := remote_objects.get(prefix + name)) is None
            or not self._has_content(bucket, item, body)
        ]
        if (size := sum(size_of(body) for _, body in missing_files)) > 1 << 20:
            say(f"uploading {spell_bytes(size)} to {uri}")
        store = self._bucket(bucket)
        for name, body in missing_files:
            if isinstance(body, bytes):
                send = partial(store.put_object, prefix + name, body)
            else:
                send = partial(
                    oss2.resumable_upload,
                    store,
                    prefix + name,
                    str(body),
                    multipart_threshold=_PARTS_FROM,
                )
            self._store(f"write {uri}{name}", send, PERSIST_S)

    def _has_content(self, bucket: str, item: Mapping[str, Any], body: Body) -> bool:
        """Whether an object of a listing has the content of a file or bytes: by its MD5, else by
        its CRC-64.

        The ETag of an object that was sent in parts, or is encrypted by KMS, is no MD5.
        Source: https://www.alibabacloud.com/help/en/oss/developer-reference/putobject (2026-02).
        """
        import oss2

        if item["Size"] != size_of(body):
            return False
        if item["ETag"].strip('"') == etag_of(body, None):
            return True
        try:
            head = self._store(
                f"read {item['Key']}", lambda: self._bucket(bucket).head_object(item["Key"])
            )
        except CloudError:  # it may not be read here, so it is sent again
            return False
        crc = oss2.utils.Crc64()
        for block in blocks_of(body):
            crc.update(block)
        return bool(head.server_crc == crc.crc)

    def _bucket(self, name: str) -> Any:
        import_oss()
        import oss2

        region = self.section.region or ""
        endpoint = self.section.oss_endpoint or f"oss-{region}.aliyuncs.com"
        endpoint = endpoint if "://" in endpoint else f"https://{endpoint}"
        seconds = (_CONNECT_MS / 1000, _READ_MS / 1000)
        return oss2.Bucket(
            oss2.ProviderAuthV4(_OssKeys(self._credentials)),
            endpoint,
            name,
            region=region,
            connect_timeout=seconds,
        )

    def _store(self, doing: str, call: Callable[[], _Some], seconds: float = _ANSWER_S) -> _Some:
        """A call of OSS, repeated for so long if OSS is busy or away.

        Raises `CloudError` with what was being done.
        """
        return retry_while_lost(lambda: self._call(doing, call), Patience(seconds), CloudLostError)

    def _call(self, doing: str, call: Callable[[], _Some]) -> _Some:
        import_oss()
        import oss2

        try:
            return call()
        except oss2.exceptions.RequestError as error:
            raise self._lost_error(doing, error.exception) from None
        except oss2.exceptions.OssError as error:
            if error.code == "FileAlreadyExists":
                raise ObjectTakenError(doing) from None
            message = f"{error.code or error.status}: {error.message or 'no reason given'}"
            if error.status in _BUSY:
                raise self._lost_error(doing, message) from None
            raise CloudError(
                f"OSS did not {doing} ({message}); check pai.storage, and your rights on the bucket"
            ) from None


class _OssKeys:
    """The caller's credentials in the form that oss2 asks for."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def get_credentials(self) -> Any:
        import oss2.credentials

        credential = self._client.get_credential()
        return oss2.credentials.Credentials(
            credential.access_key_id, credential.access_key_secret, credential.security_token or ""
        )


def import_oss() -> None:
    """Raise `CloudError` if the package of OSS is missing."""
    try:
        import oss2  # noqa: F401
    except ImportError:
        raise CloudError(missing_module("oss2")) from None


def _keys(value: Any, prefix: str = "") -> set[str]:
    """The paths of all keys of a request."""
    if isinstance(value, Mapping):
        items_by_path = {f"{prefix}{key}": item for key, item in value.items()}
        return set(items_by_path).union(
            *(_keys(item, f"{key}.") for key, item in items_by_path.items())
        )
    return (
        set().union(*(_keys(item, prefix) for item in value)) if isinstance(value, list) else set()
    )
