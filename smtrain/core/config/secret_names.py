"""Names under which secrets stand: PGPASSWORD, hfToken, SECRETKEY, WANDB_KEY; and those that only sound alike."""

from __future__ import annotations

import re
from typing import Literal

_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_CERTAIN = re.compile(
    r".*(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PASSCODE|(API|SECRET|ACCESS|PRIVATE|AUTH)KEY|CREDENTIALS?|CREDS?)"
    r"|(DB|PG|SQL|MYSQL|USER|ROOT|ADMIN|SMTP|REDIS|MAIL|KEY|LOGIN)?(PASS|PWD)|AUTHORIZATION|AUTH|BEARER|COOKIE"
)
_KEYS = re.compile(r"API|ACCESS|SECRET|PRIVATE|AUTH|ENCRYPTION|SIGNING|MASTER|SERVICE|ACCOUNT|CLIENT|SSH|DEPLOY|HMAC")
_OTHER_KEYS = re.compile(r"KMS|PUBLIC|PARTITION|SORT|PRIMARY|FOREIGN|CACHE|OBJECT|ROUTING|GROUP|HOT")
# Of a name that ends so the value is about the secret, and not the secret.
_ABOUT = re.compile(
    r"FILE|PATH|DIR|FOLDER|NAME|ID|ARN|URI|URL|HOST|ENDPOINT|REGION|TYPE|MODE|TTL|EXPIRY|LENGTH|COUNT|LIMIT|SIZE|PREFIX"
    r"|VERSION|PROVIDER|MANAGER|STORE|ENABLED|USER|METHOD|CLASS"
)
_SPECIAL = re.compile(r"EOS|BOS|PAD|UNK|SEP|CLS|MASK|STOP|END|START|EOT|EOD|IMAGE|SPECIAL")
_WAYS = re.compile(r"basic|iam|ldap|kerberos|oauth2?|oidc|sso|jwt|tls|ssl|mtls|digest|required|optional", re.IGNORECASE)


def telling(name: str) -> Literal["certain", "likely"] | None:
    """What a name says of its value: that it is a secret, that it is one if it looks drawn by chance, or nothing."""
    parts = [part.upper() for part in _PARTS.findall(name)]
    if not parts or _ABOUT.fullmatch(parts[-1]):
        return None
    for number, part in enumerate(parts):
        before = parts[number - 1] if number else ""
        if _CERTAIN.fullmatch(part) and not (part == "TOKEN" and _SPECIAL.fullmatch(before)):
            return "certain"
        if part == "KEY" and _KEYS.fullmatch(before):
            return "certain"
    if parts[-1].endswith("KEY") and not (len(parts) > 1 and _OTHER_KEYS.fullmatch(parts[-2])):
        return "likely"
    return None


def is_special_token(value: str) -> bool:
    """What stands under such a name and is none: a token of a tokenizer, a way to log in."""
    return bool(_WAYS.fullmatch(value)) or (value.startswith(("<", "[")) and value.endswith((">", "]")))
