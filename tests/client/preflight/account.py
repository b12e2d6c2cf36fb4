"""An AWS account to check: S3 is the local control plane's, all other answers are the test's."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

from botocore.exceptions import ClientError
from botocore.validate import ParamValidator

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.core.botocore_models import isolated_session

Answer = Mapping[str, Any] | str | Callable[[dict[str, Any]], Any]
"""A reply, an error code, or a function of the parameters that returns one of them."""


class Account(SageMakerBackend):
    """Target aws with answers by `service.Operation`; replies are validated against botocore's own
    models.
    """

    answers: dict[str, Answer]
    real: Any
    asked: list[tuple[str, dict[str, Any]]]

    def __init__(self, region: str, answers: Mapping[str, Answer], s3: Any) -> None:
        super().__init__("aws", region)
        self.__dict__.update(answers=dict(answers), real=s3, asked=[])

    def client(self, service: str) -> Any:
        import boto3

        if service == "s3" and not any(name.startswith("s3.") for name in self.answers):
            return self.real
        session: Any = boto3.Session(botocore_session=isolated_session())
        client = session.client(
            service,
            region_name=self.region,
            aws_access_key_id="x",
            aws_secret_access_key="x",
            endpoint_url="http://127.0.0.1:9",
        )
        client.meta.events.register("provide-client-params.*.*", self._note)
        client.meta.events.register("before-call.*.*", self._answer)
        return client

    def _note(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        self.asked.append((f"{model.service_model.service_name}.{model.name}", params))

    def _answer(self, model: Any, params: dict[str, Any], **_: Any) -> Any:
        name = f"{model.service_model.service_name}.{model.name}"
        given = next(asked for what, asked in reversed(self.asked) if what == name)
        answer = self.answers.get(name, "AccessDenied")
        if callable(answer):
            answer = answer(given)
        if isinstance(answer, str):
            raise ClientError(
                {"Error": {"Code": answer, "Message": f"{name}: {answer}"}}, model.name
            )
        body = {k: v for k, v in answer.items() if not isinstance(v, io.IOBase)}
        if model.output_shape is not None:
            report = ParamValidator().validate(body, model.output_shape)
            assert not report.has_errors(), report.generate_report()
        return type("Http", (), {"status_code": 200})(), copy.deepcopy(dict(answer))
