"""Personal data by patterns: e-mail addresses, public IP addresses, phone numbers, card numbers."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from typing import Any

from smtrain.worker.data.clean.cleaning import require

_AROUND = 60
_EMAIL = re.compile(
    r"(?<![\w.%+-])[A-Za-z0-9_%+-][\w.%+-]{0,63}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}"
    r"(?![\w-])"
)
_V4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d)")
_V6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f]{1,4}:(?:[0-9A-Fa-f]{0,4}:){1,7}[0-9A-Fa-f]{0,4}(?![\w:])")
_UNICAST = ipaddress.IPv6Network("2000::/3")
_CARD = re.compile(r"(?<![\w.-])\d(?:[ -]?\d){12,18}(?![\w-]|\.\d)")
# issuers by the first digits, and how long their numbers are
_ISSUERS = [
    (re.compile(r"4"), (13, 16, 19)),
    (re.compile(r"5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720"), (16,)),
    (re.compile(r"3[47]"), (15,)),
    (re.compile(r"6011|65|64[4-9]"), (16, 17, 18, 19)),
    (re.compile(r"3(?:0[0-5]|[689])"), (14, 16, 17, 18, 19)),
    (re.compile(r"35(?:2[89]|[3-8])"), (16, 17, 18, 19)),
    (re.compile(r"62"), (16, 17, 18, 19)),
]
_PHONE = re.compile(r"(?<![\w.])[+(]?\d[\d\s().\-/\u2010-\u2015]{5,24}\d(?!\w)")

EMAIL, IP, CARD, PHONE = "e-mail addresses", "IP addresses", "card numbers", "phone numbers"
MASKS = {
    EMAIL: "<EMAIL_ADDRESS>",
    IP: "<IP_ADDRESS>",
    CARD: "<CREDIT_CARD>",
    PHONE: "<PHONE_NUMBER>",
}


class PersonalData:
    """Finds and masks personal data.

    Phone numbers need a country code, except those of `region` (US, DE...).
    """

    def __init__(self, region: str | None = None) -> None:
        require("data.pii", "phonenumbers")
        self._region = region
        self._finders: dict[str, Callable[[str], Iterator[tuple[int, int]]]] = {
            EMAIL: lambda text: (
                (match.span() for match in _EMAIL.finditer(text)) if "@" in text else iter(())
            ),
            IP: _addresses,
            CARD: _cards,
            PHONE: self._phones,
        }

    def mask(self, text: str) -> tuple[str, dict[str, int]]:
        """The text with a word in place of each finding, and the number of findings by kind."""
        counts: dict[str, int] = {}
        for kind, find in self._finders.items():
            parts, at = [], 0
            for start, end in find(text):
                parts += [text[at:start], MASKS[kind]]
                at = end
                counts[kind] = counts.get(kind, 0) + 1
            if parts:
                text = "".join([*parts, text[at:]])
        return text, counts

    def _phones(self, text: str) -> Iterator[tuple[int, int]]:
        import phonenumbers

        end = 0
        for digits in _PHONE.finditer(text):
            if self._region is None and "+" not in text[max(0, digits.start() - 3) : digits.end()]:
                continue
            # the matcher tries every start in its text, so it gets only the surroundings of the
            # digits
            start = max(end, digits.start() - 3)
            matches: Any = phonenumbers.PhoneNumberMatcher(
                text[start : digits.end() + 1], self._region
            )
            for match in matches:
                yield start + match.start, start + match.end
                end = start + match.end


def excerpt(masked_text: str, kind: str) -> str:
    """The surroundings of the first finding of a kind, which itself stays masked."""
    at = masked_text.find(MASKS[kind])
    return masked_text[max(0, at - _AROUND) : at + len(MASKS[kind]) + _AROUND]


def _addresses(text: str) -> Iterator[tuple[int, int]]:
    return iter(
        sorted(m.span() for pattern in (_V4, _V6) for m in pattern.finditer(text) if _public(m[0]))
    )


def _public(text: str) -> bool:
    """Whether it is a global unicast address; private ones identify no person."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return (
        address.is_global
        and not address.is_multicast
        and (address.version == 4 or address in _UNICAST)
    )


def _cards(text: str) -> Iterator[tuple[int, int]]:
    for match in _CARD.finditer(text):
        digits = re.sub(r"\D", "", match[0])
        if any(
            len(digits) in lengths and issuer.match(digits) for issuer, lengths in _ISSUERS
        ) and luhn(digits):
            yield match.span()


def luhn(digits: str) -> bool:
    """Whether the last digit is the check digit of those before it (ISO/IEC 7812-1)."""
    total = sum(int(d) for d in digits[-1::-2]) + sum(
        sum(divmod(2 * int(d), 10)) for d in digits[-2::-2]
    )
    return total % 10 == 0
