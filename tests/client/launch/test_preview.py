"""A request to look at, and not to send."""

from __future__ import annotations

import copy
import html
import json
import re
from typing import Any

from botocore.session import Session
from botocore.validate import ParamValidator

import smtrain
from smtrain.client.launch.request import Request


def test_it_shows_itself_in_a_line_and_opens_in_a_notebook(raw: dict[str, Any]) -> None:
    raw["output"] = {"s3_uri": "s3://bucket/runs"}
    request = smtrain.request(raw, target="local")
    assert isinstance(request, Request)
    assert re.fullmatch(
        r"<request of tiny-train-\w+ on 2 x ml.trn1.2xlarge, at most \d+ h; json.dumps shows its"
        r" \d+ fields>",
        repr(request),
    )
    shown = request._repr_html_()
    assert shown.startswith("<details><summary>tiny-train-")
    (text,) = re.findall(r"<pre[^>]*>(.*)</pre>", shown, re.DOTALL)
    assert json.loads(html.unescape(text)) == request


def test_it_is_a_dict_to_everyone_else(raw: dict[str, Any]) -> None:
    raw["output"] = {"s3_uri": "s3://bucket/runs"}
    request = smtrain.request(raw, target="local")
    assert json.loads(json.dumps(request)) == request == dict(request) == copy.deepcopy(request)
    shape = (
        Session().get_service_model("sagemaker").operation_model("CreateTrainingJob").input_shape
    )
    assert shape is not None
    assert not ParamValidator().validate(request, shape).has_errors()


def test_what_stands_in_it_is_text(raw: dict[str, Any]) -> None:
    raw["output"] = {"s3_uri": "s3://bucket/runs"}
    request: Any = smtrain.request(raw, target="local")
    request["TrainingJobName"] = "<script>\u202e"
    assert "<script>" not in request._repr_html_()
    assert "\u202e" not in request._repr_html_()
