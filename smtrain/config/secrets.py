"""What a secret written out looks like: by its issuer's pattern, by the name it stands under, or by its randomness."""

from __future__ import annotations

import itertools
import re

HIDDEN = "<hidden: looks like a secret>"
# Prefixes that issuers give their tokens so that they can be found: Hugging Face, AWS, GitHub, GitLab, OpenAI and
# Anthropic, Slack, npm, Google; JSON web tokens; private keys; a password in a URL.
_PATTERN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{30,}|(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
    r"|sk-[\w-]*[A-Za-z0-9]{20,}[\w-]*|xox[abeprs]-[\w-]{10,}|npm_[A-Za-z0-9]{36}|AIza[\w-]{35}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}|https?://[^\s/:@]+:[^\s/@]+@"
    r")|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIALS?)($|_)", re.IGNORECASE)
_PLAIN = re.compile(r"-?[\d.]+|true|false|yes|no|on|off|none", re.IGNORECASE)
# What names something elsewhere is no secret, however random it looks; a secret's own name may stand here.
_POINTER = re.compile(r"(s3|hf|demo|file)://|arn:aws|/|\d{12}\.dkr\.ecr\.|https?://")
_RUN, _WORD = re.compile(r"[A-Za-z0-9+/]{20,}"), re.compile(r"[A-Za-z0-9+]{20,}")
_CHANGES = 0.32
"""Changes between lower case, upper case and digits per character, beginnings of words not counted: random base64 has
0.45, names in camel case 0.2."""


def is_secret(value: str, name: str = "") -> bool:
    """Whether `value`, which stands under the key `name`, is likely to be a secret itself."""
    if not value:
        return False
    if _PATTERN.search(value):
        return True
    if _NAME.search(name) and not _PLAIN.fullmatch(value) and not _POINTER.match(value):
        return True
    return not _POINTER.match(value) and any(map(_random, _RUN.findall(value)))


def hide(text: str) -> str:
    """The text without what looks like a secret in it: for error messages, which repeat what they were given."""
    text = _PATTERN.sub(HIDDEN, text)
    return _WORD.sub(lambda run: HIDDEN if _random(run[0]) else run[0], text)


def _random(run: str) -> bool:
    """Whether a run of characters changes its class as often as chance would; hexadecimal digests do not count."""
    kinds = ["a" if c.islower() else "A" if c.isupper() else "0" if c.isdigit() else "+" for c in run]
    if not {"a", "A", "0"} <= set(kinds):
        return False
    pairs = itertools.pairwise(kinds)
    changes = sum(one != other and (one, other) != ("A", "a") for one, other in pairs)
    return changes / len(run) >= _CHANGES
