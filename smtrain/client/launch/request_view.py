"""A request to look at: the mapping itself, which shows itself in a line, and in a notebook as one that opens."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from smtrain.core.protocol.requests import machines_of
from smtrain.core.text import clean


class Request(dict[str, Any]):
    """CreateTrainingJob's arguments. `json.dumps` and `boto3` take it like any dict."""

    @property
    def headline(self) -> str:
        """Its job, machines and time limit in a line."""
        limit = self["StoppingCondition"]["MaxRuntimeInSeconds"] / 3600
        return f"{self['TrainingJobName']} on {machines_of(self)}, at most {limit:g} h"

    def __repr__(self) -> str:
        return f"<request of {self.headline}; json.dumps shows its {len(self)} fields>"

    def _repr_html_(self) -> str:
        """The headline, which opens to all of it."""
        text = clean(json.dumps(self, indent=2))
        return (
            f"<details><summary>{escape(clean(self.headline))}</summary>"
            f'<pre style="white-space:pre-wrap;overflow-wrap:anywhere">{escape(text)}</pre></details>'
        )
