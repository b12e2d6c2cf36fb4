"""Word pydantic's errors as one sentence per fault: the key, the value, the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from smtrain.core.config.annotations import section_in
from smtrain.core.errors import Code, Sentence
from smtrain.core.facts import table
from smtrain.core.facts.name_suggestions import instance_meant, region_meant
from smtrain.core.protocol.uris import meant
from smtrain.core.suggest import nearest, variable_fault

_LONGEST = 200

_QUANTITY = "give a size with its unit, such as 512Gi"
_NAME_OF_CLUSTER = "use small letters, digits and hyphens, as Kubernetes does"
_ENDPOINT = "give a host, such as {}, without a path"
# The meaning of a pattern in the schema, by the key or its last part.
_PATTERNS = {
    "pai.region": "give the name of a region of Alibaba Cloud, such as cn-beijing",
    "pai.workspace": "give the workspace's ID, which is a number",
    "pai.storage": "give a bucket and a prefix, such as oss://my-bucket/smtrain",
    "pai.mount": "give an absolute path in the pods, such as /mnt/smtrain",
    "pai.ecs_spec": "give a type of Alibaba Cloud, such as ecs.gn7e-c16g1.16xlarge",
    "pai.cpu_ecs_spec": "give a type of Alibaba Cloud, such as ecs.g7.8xlarge",
    "pai.data.uri": "give an address that begins with oss://, nas:// or cpfs://",
    "pai.data.path": "give an absolute path in the pods, such as /mnt/text",
    "pai.code.path": "give an absolute path in the pods, such as /root/code",
    "pai.vpc.id": "give the ID of a VPC, such as vpc-2ze0123456789",
    "pai.vpc.switch": "give the ID of a vSwitch, such as vsw-2ze0123456789",
    "pai.vpc.security_group": "give the ID of a security group, such as sg-2ze0123456789",
    "pai.vpc.cidrs": "give address ranges, such as [192.168.0.0/16]",
    "pai.endpoint": _ENDPOINT.format("pai-dlc-vpc.cn-beijing.aliyuncs.com"),
    "pai.oss_endpoint": _ENDPOINT.format("oss-cn-beijing-internal.aliyuncs.com"),
    **{
        f"pai.{of}.{name}": _QUANTITY
        for of in ("resources", "cpu_resources")
        for name in ("memory", "shared_memory")
    },
    "kubernetes.namespace": _NAME_OF_CLUSTER,
    "kubernetes.storage": "give a bucket and a prefix, such as s3://my-bucket/smtrain",
    "kubernetes.shared_memory": _QUANTITY,
    "kubernetes.data.path": "give an absolute path in the pods, such as /mnt/text",
    **{
        f"kubernetes.{name}": _NAME_OF_CLUSTER
        for name in (
            "queue",
            "service_account",
            "data.claim",
            "priority_class",
            "image_pull_secret",
            "env_secret",
        )
    },
    "name": "use letters, digits and single hyphens, at most 36 in all",
    "training_plan": (
        "give the ARN of a training plan, arn:aws:sagemaker:REGION:ACCOUNT:training-plan/NAME"
    ),
    "region": "give the name of an AWS region, such as us-west-2",
    "model_package_group": (
        "give its ARN, arn:aws:sagemaker:REGION:ACCOUNT:model-package-group/NAME"
    ),
    "source_model_package": (
        "give its ARN, arn:aws:sagemaker:REGION:ACCOUNT:model-package/NAME/VERSION"
    ),
    "s3_uri": "give an s3://bucket/prefix URI",
    "instance_type": (
        "give a SageMaker instance type, such as ml.trn1.32xlarge, or the name of one of `machines`"
    ),
    "[key]": (
        "a machine's name begins with a small letter, and has small letters, digits and hyphens"
        " only, or is a new type of AWS's, such as ml.p7.48xlarge"
    ),
    "cpu_instance_type": "give a SageMaker instance type, such as ml.m5.4xlarge",
}

# Our words for pydantic's messages ("Input should be ..."), by the type of error; names are those
# of its context.
_WORDS = {
    "string_type": "text is needed; write it in quotes",
    "int_type": "a whole number is needed",
    "int_parsing": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_type": "a number is needed",
    "float_parsing": "a number is needed",
    "finite_number": "a finite number is needed",
    "bool_type": "it is true or false",
    "bool_parsing": "it is true or false",
    "tuple_type": "a list is needed, such as [a, b]",
    "list_type": "a list is needed, such as [a, b]",
    "less_than_equal": "it must be at most {le:,}",
    "less_than": "it must be below {lt:,}",
    "greater_than_equal": "it must be at least {ge:,}",
    "greater_than": "it must be above {gt:,}",
    "literal_error": "it is {expected}",
}


def format_value(text: str) -> str:
    """A value on one line, short enough for a sentence."""
    text = " ".join(text.splitlines())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"


def key_of(detail: Any) -> tuple[list[str], str]:
    """The path of keys to a fault of pydantic's, and the key as it is written in a config."""
    way = [part for part in detail["loc"] if isinstance(part, str) and part != "[key]"]
    return way, ".".join(way) or "config"


def sentence_of(root: type[BaseModel], key: str, detail: Any) -> Sentence:
    """A fault that pydantic found in `root`, a whole config or one section: the key, the value, the
    remedy.
    """
    code: Code = "config.wrong_value"
    if detail["type"] == "missing" and not isinstance(detail["loc"][-1], int):
        code = "config.missing_key"
    elif detail["type"] == "extra_forbidden":
        code = "config.unknown_key"
    return Sentence(_text_of(root, key, detail), code)


def _text_of(root: type[BaseModel], key: str, detail: Any) -> str:
    kind, value = detail["type"], detail.get("input")
    if kind == "missing" and isinstance(detail["loc"][-1], int):
        return (
            f"{key}: got {format_value(repr(value))}; it has too few numbers, as many as in"
            f" {_default(root, key)!r} are needed"
        )
    if kind == "missing":
        key = "model.path" if key == "model" else key
        return f"{key}: is missing; set it in the config or with --set {key}=..."
    if kind == "extra_forbidden":
        return f"{key}: {unknown_key(key_meant(root, key), _siblings(root, key))}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return (
            f"{key}: got {format_value(repr(value))}; it is a section with"
            f" keys{_keys_of(root, key, value)}"
        )
    if kind == "string_type" and isinstance(value, (list, tuple)):
        several = "; name several texts under data.sources" if key == "data.path" else ""
        return f"{key}: got {format_value(repr(value))}; one text is needed, not a list{several}"
    last = "[key]" if "[key]" in detail["loc"] else key.rpartition(".")[2]
    if kind == "string_pattern_mismatch" and (words := _PATTERNS.get(key) or _PATTERNS.get(last)):
        guess = "" if key in _PATTERNS else _pattern_meant(last, str(value))
        guess = variable_fault(str(value)) or guess
        return f"{key}: got {format_value(repr(value))}; {guess}{words}"
    reason = variable_fault(value) if isinstance(value, str) else ""
    return (
        f"{key}: got {format_value(repr(value))}; {reason}{in_words(detail)}{_choice_meant(detail)}"
    )


def _keys_of(root: type[BaseModel], key: str, value: Any) -> str:
    """The keys of a section that was given as one value; for `model` and `data` the key that was
    probably meant.
    """
    if key == "parallel":
        return ", or the word auto"
    names = _siblings(root, f"{key}.x")
    if "path" in names and isinstance(value, str):
        return f"; did you mean {key}.path: {format_value(value)}?"
    return f", such as {key}.{names[0]}" if names else ""


def _choice_meant(detail: Any) -> str:
    """The choice that was probably meant; empty if none is similar."""
    if detail["type"] != "literal_error" or not isinstance(detail.get("input"), str):
        return ""
    choices = re.findall(r"'([^']*)'", detail["ctx"]["expected"])
    suggestion = nearest(detail["input"], choices, table("word_names")["values"])
    return f"; did you mean {suggestion}?" if suggestion else ""


def _pattern_meant(last: str, text: str) -> str:
    """The instance type, region or URI that was probably meant; empty if none is similar."""
    if last in ("instance_type", "cpu_instance_type"):
        suggestion = instance_meant(text)
    elif last == "region":
        suggestion = region_meant(text)
    elif last == "s3_uri":
        suggestion = meant(text) or (
            f"s3://{text}" if re.fullmatch(r"[a-z0-9][\w.-]+/.*", text) else None
        )
        suggestion = suggestion if suggestion and suggestion.startswith("s3://") else None
    else:
        suggestion = None
    return f"did you mean {suggestion}? " if suggestion else ""


def unknown_key(meant: str | None, known_keys: Iterable[str]) -> str:
    """Say that a key is unknown, with the one that was meant, else with all known keys."""
    return (
        f"unknown key; did you mean {meant}?"
        if meant
        else f"unknown key; known: {', '.join(known_keys)}"
    )


def in_words(detail: Any) -> str:
    """The fault of a value, without its key."""
    if words := _WORDS.get(detail["type"]):
        return words.format(**detail.get("ctx", {}))
    message = str(detail["msg"]).removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}"


def _default(root: type[BaseModel], key: str) -> Any:
    section, _, field = key.rpartition(".")
    if not section:
        return root.model_fields[field].get_default()
    return getattr(root.model_fields[section].get_default(), field)


def key_meant(root: type[BaseModel], key: str, *, close: bool = True) -> str | None:
    """The key that was probably meant: one of another section, another tool's name for it, or a
    similar one.

    Keys of the named section come first. close: also accept a less similar key.
    """
    head, _, last = key.rpartition(".")
    word = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", last).lower()
    is_full_config = (
        "train" in root.model_fields
    )  # aliases and other sections make sense only for a whole config
    keys = (
        [known_key for known_key in every_key(root) if "." in known_key] if is_full_config else []
    )
    siblings = _siblings(root, key)
    names = table("key_names")
    if not is_full_config:
        names = {
            known_key.rpartition(".")[2]: words
            for known_key, words in names.items()
            if known_key.rpartition(".")[2] in siblings
        }
    aliases = [
        known_key
        for known_key in names
        if word in names[known_key] or key.lower() in names[known_key]
    ]
    if alias := next(
        (known_key for known_key in aliases if head and known_key.startswith(f"{head}.")), None
    ):
        return alias
    suggestion = nearest(last, siblings, cutoff=0.85)
    if suggestion and (
        head or not aliases
    ):  # recompute is another tool's name, not a slip of section compute
        return f"{head}.{suggestion}" if head else suggestion
    same_name_keys = [known_key for known_key in keys if known_key.rpartition(".")[2] == word]
    if len(same_name_keys) == 1:
        return same_name_keys[0]
    if aliases:
        return aliases[0]
    slips = {name: known_key for known_key, words in names.items() for name in words}
    if suggestion := nearest(word, slips, cutoff=0.85):
        return slips[suggestion]
    if not close:
        return None
    if suggestion := nearest(last, siblings):
        return f"{head}.{suggestion}" if head else suggestion
    suggestion = nearest(word, [known_key.rpartition(".")[2] for known_key in keys], cutoff=0.8)
    return next(
        (
            known_key
            for known_key in keys
            if suggestion and known_key.rpartition(".")[2] == suggestion
        ),
        None,
    )


def every_key(model: Any, head: str = "") -> Iterator[str]:
    """All keys and sections of a config, as they are written."""
    for name, field in model.model_fields.items():
        yield f"{head}{name}"
        if section := section_in(field.annotation):
            yield from every_key(section, f"{head}{name}.")


def _siblings(root: type[BaseModel], key: str) -> list[str]:
    model: Any = root
    parts = iter(key.split(".")[:-1])
    for part in parts:
        field = model.model_fields.get(part)
        model = section_in(field.annotation) if field else None
        if (
            model is None and field and get_origin(field.annotation) is dict
        ):  # sections under names of the user's
            model = section_in(get_args(field.annotation)[1])
            next(parts, None)
        if model is None:
            return []
    return list(model.model_fields)
