"""Prices of machines, dated and with their source: the shipped table, and the user's own list."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from smtrain.client.config.yaml_file import read_toml
from smtrain.core.config.compute import KINDS_OF_PRICE, Compute
from smtrain.core.config.error_messages import unknown_key
from smtrain.core.errors import ConfigError
from smtrain.core.facts import table
from smtrain.core.files import home, home_path, write_atomically
from smtrain.core.suggest import nearest
from smtrain.core.targets import TARGETS

HOUR = 3600.0


@dataclass(frozen=True)
class Price:
    """The price of one instance for an hour, with its source."""

    type: str
    option: str
    region: str
    dollars_per_hour: float
    date: str
    source: str
    guess: bool = False
    """Derived or second-hand; not a list price."""

    def __str__(self) -> str:
        return (
            f"{self.dollars_per_hour:.2f} $/h {self.type} {self.option.replace('_', ' ')}"
            f" {self.region} ({'a guess, ' if self.guess else ''}{self.date}, {self.source})"
        )


def option_of(compute: Compute) -> str:
    """The kind of price that the train stage's machines are paid at."""
    return (
        compute.price if isinstance(compute.price, str) else "spot" if compute.spot else "on_demand"
    )


def price_given(compute: Compute) -> list[Price]:
    """The row of a price that the config itself gives in dollars."""
    if compute.price is None or isinstance(compute.price, str):
        return []
    region = compute.region or "every region"
    return [
        Price(
            compute.instance_type,
            option_of(compute),
            region,
            compute.price,
            "today",
            "compute.price",
        )
    ]


class Prices:
    """The shipped prices, those that AWS was asked for, and the user's; the last ones win.

    Raises `ConfigError` for a file in another format.

    For a target without SageMaker's API only the user's rows count: the shipped ones are
    SageMaker's.
    """

    def __init__(
        self,
        file: str | Path | None = None,
        extra_prices: Sequence[Price] = (),
        target: str | None = None,
    ) -> None:
        shipped_table = table("prices")
        own_table = _read_own(Path(file)) if file else {}
        of_aws = target is None or TARGETS[target].sagemaker
        self._rows = [
            *(shipped_table["rows"] if of_aws else ()),
            *(_asked_rows() if of_aws else ()),
            *own_table.get("rows", []),
        ]
        self.assumptions: dict[str, float] = {
            **shipped_table["assumptions"],
            **own_table.get("assumptions", {}),
        }
        self._prices = [Price(**row) for row in self._rows]
        self._prices += extra_prices

    @property
    def rows(self) -> tuple[Price, ...]:
        """All known prices; of two for the same machine, region and kind the later one counts."""
        return tuple(self._prices)

    def prices_of(self, type_: str, region: str | None) -> list[Price]:
        """The price of each known kind for a type."""
        prices = (self.find(type_, option, region) for option in KINDS_OF_PRICE)
        return [price for price in prices if price]

    def find(self, type_: str, option: str, region: str | None) -> Price | None:
        """The last matching row of this region, else of any region; None without one."""
        fit = [p for p in self._prices if p.type == type_ and p.option == option]
        in_region = [p for p in fit if p.region == region]
        matches = in_region or fit
        return matches[-1] if matches else None


def _read_own(file: Path) -> dict[str, Any]:
    """The user's rows and assumptions.

    Raises `ConfigError` for unknown keys and values of the wrong type.
    """
    content = read_toml(file, "prices", "name a TOML file of prices")
    assumptions = table("prices")["assumptions"]
    faults = [
        f"{key}: {_unknown_key(key, ('rows', 'assumptions'))}"
        for key in content.keys() - {"rows", "assumptions"}
    ]
    user_assumptions, rows = content.get("assumptions", {}), content.get("rows", [])
    if not isinstance(user_assumptions, dict):
        faults.append("assumptions: must be a table, `[assumptions]`")
    elif wrong := [key for key in user_assumptions if key not in assumptions]:
        faults += [f"assumptions.{key}: {_unknown_key(key, assumptions)}" for key in wrong]
    else:
        faults += [
            f"assumptions.{key}: got {value!r}; a number above 0 is needed"
            for key, value in user_assumptions.items()
            if not _is_number(value) or value < 0 or (value == 0 and not key.endswith("_minutes"))
        ]
    if not isinstance(rows, list):
        faults.append("rows: must be a list, `[[rows]]`")
    else:
        faults += [
            f"a row of prices is wrong ({fault})" for row in rows if (fault := _row_fault(row))
        ]
    if faults:
        raise ConfigError(
            [f"{file}: {fault}; core/facts/prices.toml shows the format" for fault in faults],
            code="config.wrong_value",
        )
    return content


def _row_fault(row: Any) -> str | None:
    """The first fault of a row of the user's file."""
    kinds = {field.name: field.type for field in fields(Price)}
    if not isinstance(row, dict):
        return "it is no table; write `[[rows]]` above its keys"
    for key in row.keys() - kinds.keys():
        return f"{key}: {_unknown_key(key, kinds)}"
    for key, kind in kinds.items():
        if key not in row and key != "guess":
            return f"{key} is missing"
        value = row.get(key, False)
        if kind == "float" and not (_is_number(value) and value >= 0):
            return f"{key}: got {value!r}; a number of at least 0 is needed"
        if kind == "str" and not isinstance(value, str):
            return f"{key}: got {value!r}; text is needed, in quotes"
        if kind == "bool" and not isinstance(value, bool):
            return f"{key}: got {value!r}; it is true or false"
    return (
        None
        if row["option"] in KINDS_OF_PRICE
        else f"option: got {row['option']!r}; it is {' or '.join(KINDS_OF_PRICE)}"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _unknown_key(key: str, known_keys: Iterable[str]) -> str:
    names = list(known_keys)
    return unknown_key(nearest(key, names), names)


def _asked_path() -> Path:
    return home_path() / "prices-aws.toml"


def _asked_rows() -> list[dict[str, Any]]:
    """The rows that `store_prices` wrote; none before it did."""
    file = _asked_path()
    rows: list[dict[str, Any]] = _read_own(file).get("rows", []) if file.is_file() else []
    return rows


def store_prices(prices: Sequence[Price]) -> None:
    """Store prices that AWS was asked for in $SMTRAIN_HOME/prices-aws.toml; each replaces the older
    one of its type, kind and region.
    """
    rows = {
        (row["type"], row["option"], row["region"]): row
        for row in (*_asked_rows(), *({**asdict(price)} for price in prices))
    }
    # JSON's texts and numbers are TOML's too.
    lines = [
        "[[rows]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in row.items())
        for row in rows.values()
    ]
    home()
    write_atomically(_asked_path(), "\n".join(lines).encode())


def own_prices() -> Path | None:
    """The user's price list in $SMTRAIN_HOME, if it exists."""
    file = home_path() / "prices.toml"
    return file if file.is_file() else None
