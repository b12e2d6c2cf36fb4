"""Recognise secrets in clear text by their issuer's pattern, by the name of their key, or by their
randomness.

Our own rules apply everywhere. On machines with detect-secrets, which every client has, its
patterns of issuers' tokens are added; a container has only our rules. Rates: docs/secrets-reference.md.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, Literal

from smtrain.core.extras import pause_collector

REDACTION = "<hidden: looks like a secret>"
# Prefixes that issuers give their tokens so that they can be found: Hugging Face, AWS, GitHub,
# GitLab, OpenAI and Anthropic, Slack, npm, PyPI, Google, Stripe, SendGrid, Twilio, Telegram,
# Docker, Databricks, Square, Mailchimp; JSON web tokens; private keys.
_ISSUER_PATTERNS = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{30,}|(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
    r"|sk-[\w-]{0,40}?[A-Za-z0-9]{20,200}[\w-]{0,200}|xox[abeprs]-[\w-]{10,}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,}|AIza[\w-]{35}"
    r"|[rs]k_(?:live|test)_[A-Za-z0-9]{20,}|SG\.[\w-]{20,30}\.[\w-]{30,60}|(?:SK|AC)[0-9a-f]{32}|\d{8,10}:AA[\w-]{33}"
    r"|dckr_pat_[\w-]{20,}|dapi[0-9a-f]{32}|sq0[a-z]{3}-[\w-]{22,}|[0-9a-f]{32}-us\d{1,2}"
    r"|eyJ[\w-]{8,1000}\.eyJ[\w-]{8,}\.[\w-]{8,}"
    r")(?![A-Za-z0-9])|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[^-]*-----END [A-Z ]*PRIVATE KEY-----)?"
)
# Secrets inside longer texts, each in the group `secret`: a password in a URL; the signature of a
# URL; the path of a web hook; the token of an Authorization header; a password in settings, options
# or JSON.
_PARTS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s/:@]{0,100}:(?P<secret>[^\s/@]{1,300})@",
        r"(?i)[?&;](?:x-(?:amz|goog)-signature|x-amz-security-token|signature|sig|access_token|api_key|token)="
        r"(?P<secret>[^&\s\"']{16,})",
        r"(?i)https://hooks\.\S{1,100}?/(?:services|workflows|triggers|hooks?(?:/catch)?)/(?P<secret>[^\s\"']{8,})",
        r"(?i)https://[^\s\"']{0,200}?(?:/api/webhooks|\.webhook\.office\.com/\w+|/webhooks?)/(?P<secret>[^\s\"']{12,})",
    )
)
_HEADER = re.compile(r"(?i)\b(?:bearer|basic|token)[ =:]+(?P<secret>[A-Za-z0-9+/=._~-]{16,})")
_SETTING = re.compile(
    r"(?i)(?<![:\w.-])(?P<name>[\w.-]*(?:auth|pass(?:word|wd|phrase)?|pwd|secret|token|api[_-]?key|credentials?"
    r"|authorization|wandb_key|(?:account|access|secret|private|auth|signing|encryption)[_-]?key))"
    r"[\"']?(?:\s*[=:]\s*|(?<=key)\s+)[\"']?(?P<secret>[^\s\"',;<>]{3,})"
)
_PLAIN = re.compile(
    r"-?[\d.,:]+|true|false|yes|no|on|off|none|null|auto|\W.{0,3}|<.*>|\$\{[\w.]+\}|\$[A-Z_]{3,}|\*+",
    re.IGNORECASE,
)
# A reference to something elsewhere is not a secret, even if it looks random.
_POINTER = re.compile(r"[a-z][a-z0-9+.-]*://|arn:aws|\d{12}\.dkr\.ecr\.|[~.]{0,2}/[\w.-]+(/|$)")
_WORD = re.compile(r"[a-z]+([-_ ][a-z]+)*")
_RUN = re.compile(r"[A-Za-z0-9+/]{20,}")
# Detectors of the library for an issuer's pattern. Keywords and entropies are judged by our rules,
# and Artifactory's pattern matches ordinary words (AP, a letter, eight more).
_DETECTORS = {
    "aws": "AWSKeyDetector",
    "azure_storage_key": "AzureStorageKeyDetector",
    "basic_auth": "BasicAuthDetector",
    "discord": "DiscordBotTokenDetector",
    "github_token": "GitHubTokenDetector",
    "gitlab_token": "GitLabTokenDetector",
    "jwt": "JwtTokenDetector",
    "mailchimp": "MailchimpDetector",
    "npm": "NpmDetector",
    "openai": "OpenAIDetector",
    "private_key": "PrivateKeyDetector",
    "pypi_token": "PypiTokenDetector",
    "sendgrid": "SendGridDetector",
    "slack": "SlackDetector",
    "square_oauth": "SquareOAuthDetector",
    "stripe": "StripeDetector",
    "telegram_token": "TelegramBotTokenDetector",
    "twilio": "TwilioKeyDetector",
}


def is_secret(value: str, name: str = "") -> bool:
    """Whether `value`, under the key `name`, is probably a secret."""
    verdict = _by_our_rules(value, name)
    return any(_library(value)) if verdict is None else verdict


@lru_cache(4096)  # a command loads its config several times, and most words of it are the schema's
def _by_our_rules(value: str, name: str) -> bool | None:
    """Whether a value is a secret; None if our rules cannot tell."""
    if not value or _PLAIN.fullmatch(value):
        return False
    if any(True for _ in _issuer_secrets(value)) or any(
        _real(match) for match in _HEADER.finditer(value)
    ):
        return True
    if any(not _WORD.fullmatch(match["secret"]) for match in _settings(value)):
        return True
    pointer = _POINTER.match(value)
    certainty = telling(name)
    if certainty == "certain" and not pointer and not is_special_token(value):
        return True
    if certainty and is_random_value(value):
        return True
    if pointer and not value.startswith("/"):
        return False
    return True if any(map(is_random, _RUN.findall(value))) else None


def hide(text: str) -> str:
    """Replace what looks like a secret, for error messages, which repeat their input."""
    for part in {*_issuer_secrets(text), *_library(text)}:
        text = text.replace(part, REDACTION)
    for pattern in (_HEADER, _SETTING):
        text = pattern.sub(_redact_match, text)
    return " ".join(_hidden_runs(word) for word in text.split(" "))


def _hidden_runs(word: str) -> str:
    """Replace the random runs in a word, except in addresses."""
    if re.search(r"\w://", word):
        return word
    return _RUN.sub(
        lambda run: REDACTION if is_random(run[0]) else "/".join(map(_piece, run[0].split("/"))),
        word,
    )


def _piece(part: str) -> str:
    return REDACTION if len(part) >= 20 and is_random(part) else part


def _issuer_secrets(text: str) -> Iterator[str]:
    """The parts of a text that are secrets by their form."""
    for match in _ISSUER_PATTERNS.finditer(text):
        yield match[0]
    for pattern in _PARTS:
        for match in pattern.finditer(text):
            if not _PLAIN.fullmatch(match["secret"]):
                yield match["secret"]


def _settings(text: str) -> Iterator[re.Match[str]]:
    for match in _SETTING.finditer(text):
        if _is_clear_text(match):
            yield match


def _is_clear_text(match: re.Match[str]) -> bool:
    """Whether a setting has a value in clear text: not a number, switch, address or token of a
    tokenizer.
    """
    value = match["secret"]
    names_secret = match.re is _HEADER or telling(match["name"])
    return bool(names_secret) and not (
        _PLAIN.fullmatch(value) or _POINTER.match(value) or is_special_token(value)
    )


def _real(match: re.Match[str]) -> bool:
    return _is_clear_text(match) and is_random_value(match["secret"])


def _redact_match(match: re.Match[str]) -> str:
    value = match["secret"]
    # "model.token: must name..." is prose
    prose = match.re is _SETTING and match[0].endswith(f": {value}") and _WORD.fullmatch(value)
    hides_value = _real(match) if match.re is _HEADER else _is_clear_text(match) and not prose
    return (
        match[0].replace(value, REDACTION)
        if hides_value and REDACTION not in match[0]
        else match[0]
    )


_LINES, _LENGTH = 200, 2000  # limits of the text given to the library, whose patterns may be slow
_with_library = True


def use_library(is_enabled: bool) -> None:
    """Switch the library on or off, for scripts/bench leaks: without it the rules are those of a
    container.
    """
    global _with_library
    _with_library = is_enabled


def has_library() -> bool:
    """Whether detect-secrets is installed."""
    return bool(_detectors())


def _library(text: str) -> list[str]:
    """The secrets that the library recognises; it is loaded only for text that our rules cannot
    judge.
    """
    if not _with_library or not _needs_library(text):
        return []
    lines = [line for line in text.splitlines()[-_LINES:] if len(line) <= _LENGTH]
    secrets = (
        secret
        for line in lines
        for detector in _detectors()
        for secret in detector.analyze_string(line)
    )
    return [str(part) for part in secrets if len(str(part)) > 3]


@lru_cache(4096)
def _needs_library(text: str) -> bool:
    """Whether a pattern of the library can match: each needs a run with more than words, or a
    login in a URL.
    """
    if "_authToken" in text or re.search(r"://\S*@", text):
        return True
    return any(not _WORD.fullmatch(run) for run in re.findall(r"[\w-]{16,}", text))


@cache
def _detectors() -> tuple[Any, ...]:
    from importlib import import_module

    try:
        with pause_collector():
            return tuple(
                getattr(import_module(f"detect_secrets.plugins.{module}"), name)()
                for module, name in _DETECTORS.items()
            )
    except (ImportError, AttributeError, OSError):
        return ()


_NAME_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_CERTAIN = re.compile(
    r".*(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PASSCODE|(API|SECRET|ACCESS|PRIVATE|AUTH)KEY|CREDENTIALS?|CREDS?)"
    r"|(DB|PG|SQL|MYSQL|USER|ROOT|ADMIN|SMTP|REDIS|MAIL|KEY|LOGIN)?(PASS|PWD)|AUTHORIZATION|AUTH|BEARER|COOKIE"
)
_KEYS = re.compile(
    r"API|ACCESS|SECRET|PRIVATE|AUTH|ENCRYPTION|SIGNING|MASTER|SERVICE|ACCOUNT|CLIENT|SSH|DEPLOY|HMAC"
)
_OTHER_KEYS = re.compile(
    r"KMS|PUBLIC|PARTITION|SORT|PRIMARY|FOREIGN|CACHE|OBJECT|ROUTING|GROUP|HOT"
)
# If a name ends so, its value is about the secret and not the secret itself.
_METADATA_ENDINGS = re.compile(
    r"FILE|PATH|DIR|FOLDER|NAME|ID|ARN|URI|URL|HOST|ENDPOINT|REGION|TYPE|MODE|TTL|EXPIRY|LENGTH|COUNT|LIMIT|SIZE|PREFIX"
    r"|VERSION|PROVIDER|MANAGER|STORE|ENABLED|USER|METHOD|CLASS"
)
_SPECIAL = re.compile(r"EOS|BOS|PAD|UNK|SEP|CLS|MASK|STOP|END|START|EOT|EOD|IMAGE|SPECIAL")
_WAYS = re.compile(
    r"basic|iam|ldap|kerberos|oauth2?|oidc|sso|jwt|tls|ssl|mtls|digest|required|optional",
    re.IGNORECASE,
)


def telling(name: str) -> Literal["certain", "likely"] | None:
    """Whether a name marks its value as a secret (certain), as one if it looks random (likely), or
    not at all.
    """
    parts = [part.upper() for part in _NAME_PARTS.findall(name)]
    if not parts or _METADATA_ENDINGS.fullmatch(parts[-1]):
        return None
    for number, part in enumerate(parts):
        previous_part = parts[number - 1] if number else ""
        if _CERTAIN.fullmatch(part) and not (part == "TOKEN" and _SPECIAL.fullmatch(previous_part)):
            return "certain"
        if part == "KEY" and _KEYS.fullmatch(previous_part):
            return "certain"
    if parts[-1].endswith("KEY") and not (len(parts) > 1 and _OTHER_KEYS.fullmatch(parts[-2])):
        return "likely"
    return None


def is_special_token(value: str) -> bool:
    """Whether a value under such a name is harmless: a token of a tokenizer, a method to log in."""
    return bool(_WAYS.fullmatch(value)) or (
        value.startswith(("<", "[")) and value.endswith((">", "]"))
    )


# The most common pairs of letters in English and in names of code (this repository, the standard
# library). They are nine of ten pairs in words, and one of four in random strings.
_PAIRS = (
    "erinreteonatesenlesttiorntcodesearedaletralimengrotaanritritecionenddimaexpelaloasgeacctisnsceeltovecapaprfiea"
    "siicunchilssllthnatsamolmprsouadheomncurrtimodpoemplutnooprrhaocabmoidckotaposmiepkeniigdascfospsublshefptsocl"
    "tyttieulaihovauscrageeumrmowirdoffxelsbarciabehiegipupqupiifsardtcivlygryptuevltcunfxtdsryoboogizevippcifeueib"
    "tlbuluizboldayslbinunvwafagsubwiauuirnrufrflddtpovdunnpurgmsogavfuokgh"
)
_COMMON = frozenset(_PAIRS[i : i + 2] for i in range(0, len(_PAIRS), 2))
_HEX = re.compile(r"[0-9a-f]+|[0-9A-F]+")
_RANDOM = 0.68
"""40 characters of random base64 have a score of 1.1 +- 0.13, 20 of them +- 0.18; names of words
and numbers 0.3.
"""


def is_random(run: str) -> bool:
    """Whether a run of characters looks random; hexadecimal digests and runs in one case do not
    count.
    """
    if _HEX.fullmatch(run) or not {"a", "A"} <= {_kind(char) for char in run}:
        return False
    return score(run) >= _RANDOM


def is_random_value(value: str) -> bool:
    """Whether a whole value looks random: as `is_random`, but digests and values in one case
    count.
    """
    value = value.rstrip("=")
    if len(value) < 16 or not re.fullmatch(r"[A-Za-z0-9+/._~-]+", value):
        return False
    return bool(_HEX.fullmatch(value)) or (not value.isdigit() and score(value) >= _RANDOM)


def score(run: str) -> float:
    """Randomness: changes of character class per character (not at signs or at the beginning of
    words), plus the share of rare pairs of letters.
    """
    kinds = [_kind(char) for char in run]
    pairs = list(itertools.pairwise(kinds))
    changes = sum(
        letter != next_letter
        and "+" not in (letter, next_letter)
        and (letter, next_letter) != ("A", "a")
        for letter, next_letter in pairs
    )
    lower = run.lower()
    letters = [
        lower[i : i + 2]
        for i, (letter, next_letter) in enumerate(pairs)
        if letter in "aA" and next_letter in "aA"
    ]
    rare = sum(pair not in _COMMON for pair in letters) / len(letters) if letters else 0.5
    return changes / len(run) + rare * min(1.0, len(letters) / 8)


def _kind(char: str) -> str:
    return "a" if char.islower() else "A" if char.isupper() else "0" if char.isdigit() else "+"
