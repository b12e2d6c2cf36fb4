"""Text that lies in S3, by pyarrow's client, and its errors as sentences."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from smtrain.core.errors import DataError, first_line
from smtrain.core.protocol.s3_probe import unanswered

_OF_S3 = re.compile(r"AWS Error (\w+) during (\w+) operation")
_AWAY = "S3 could not be reached; check the network, the proxy and the region"
_REFUSED = (
    "S3 refuses it to these credentials; log in (`aws configure` or `aws sso login`), and see that they allow "
    "s3:ListBucket and s3:GetObject there"
)
_ABSENT = "there is no such bucket or prefix; check its name and the region"
_SAID = {
    "NETWORK_CONNECTION": _AWAY, "REQUEST_TIMEOUT": _AWAY, "ACCESS_DENIED": _REFUSED,
    "INVALID_ACCESS_KEY_ID": _REFUSED, "INVALID_CLIENT_TOKEN_ID": _REFUSED, "SIGNATURE_DOES_NOT_MATCH": _REFUSED,
    "MISSING_AUTHENTICATION_TOKEN": _REFUSED, "NO_SUCH_BUCKET": _ABSENT, "RESOURCE_NOT_FOUND": _ABSENT,
    "SLOW_DOWN": "S3 asks to wait; try again in a minute",
}  # fmt: skip


def of_s3(error: BaseException) -> bool:
    """Whether a store says it, or the way to it; else it is about what the file holds."""
    return bool(_OF_S3.search(str(error)))


def said(error: BaseException) -> str:
    """What a store says, or the way to it, with a remedy and without its full stop."""
    found = _OF_S3.search(str(error))
    if found is None:
        return f"{first_line(error)}; check the URI and your permissions"
    return _SAID.get(found[1]) or f"S3 answered {found[2]} with {found[1]}; check the URI and your permissions"


def filesystem(uri: str) -> tuple[Any, str]:
    """pyarrow's client of an object store, and the path in it; AWS_ENDPOINT_URL and the usual credentials hold."""
    import pyarrow as pa
    from pyarrow import fs

    try:
        found: tuple[Any, str] = fs.FileSystem.from_uri(uri)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{uri} cannot be read: {said(error)}.") from None
    return found


def listed(uri: str) -> Iterator[tuple[str, str, int, str]]:
    """(URI, name below the prefix, bytes, stamp) of the objects of a prefix, or of those that a pattern of *, ** and ?
    means, by their paths.

    Raises DataError where they cannot be listed; where nobody answers soon, though the client would go on trying.
    """
    from pyarrow import fs

    if why := unanswered(uri):
        raise DataError(f"{uri} cannot be listed: {why}.")
    wild = re.search(r"[^/]*[*?]", uri)  # from the first level that is no name
    client, path = filesystem(uri[: wild.start()].rstrip("/") if wild else uri)
    scheme = uri.partition("://")[0]
    wanted: Callable[[str], Any] = _pattern(uri[wild.start() :]).fullmatch if wild else lambda name: True
    try:
        about = client.get_file_info(path)
        if about.type == fs.FileType.File:
            found, base = [about], path.rpartition("/")[0]
        else:
            found, base = client.get_file_info(fs.FileSelector(path, recursive=True)), path.rstrip("/")
    except OSError as error:
        raise DataError(f"{uri} cannot be listed: {said(error)}.") from None
    for one in sorted(found, key=lambda one: one.path):
        name = one.path[len(base) + 1 :]
        if one.type == fs.FileType.File and wanted(name):
            yield f"{scheme}://{one.path}", name, one.size, str(one.mtime_ns)


def _pattern(text: str) -> re.Pattern[str]:
    """`glob`'s *, ** and ? for names that are no paths of this machine."""
    kinds = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(kinds.get(t) or re.escape(t) for t in re.split(r"(\*\*/|\*\*|\*|\?)", text)))
