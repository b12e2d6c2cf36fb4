"""A secret written out is found by issuer, by name and by randomness; what only looks technical is
left alone.
"""

from __future__ import annotations

import base64
import importlib.util
import random
import string
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import smtrain
from smtrain.core.config import secrets
from smtrain.core.config.secrets import REDACTION, hide, is_secret

LETTERS = string.ascii_letters + string.digits
HEX = "0123456789abcdef"


def drawn(alphabet: str, length: int, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices(alphabet, k=length))


ISSUED = {
    "hugging face": "hf_" + drawn(string.ascii_letters, 34),
    "aws": "AKIA" + drawn(string.ascii_uppercase, 16),
    "github": "ghp_" + drawn(LETTERS, 36),
    "gitlab": "glpat-" + drawn(LETTERS, 20),
    "openai": "sk-proj-" + drawn(LETTERS, 48),
    "anthropic": "sk-ant-api03-" + drawn(LETTERS, 40),
    "slack": "xoxb-" + drawn(string.digits, 24),
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhYmMifQ." + drawn(LETTERS, 30),
    "pem": "-----BEGIN RSA PRIVATE KEY-----\nMIIE",
    "url": "https://user:pass@example.com/x",
}


@pytest.mark.parametrize("value", ISSUED.values(), ids=ISSUED)
def test_issued_tokens_are_found_anywhere_in_a_text_and_hidden(value: str) -> None:
    assert is_secret(value)
    assert is_secret(f"prefix {value}")
    if "BEGIN" not in value:
        assert value not in hide(f"got {value!r}; no")


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "HFTOKEN",
        "WANDB_API_KEY",
        "DB_PASSWORD",
        "DB_PASS",
        "PGPASSWORD",
        "PASSPHRASE",
        "AUTHORIZATION",
        "SECRETKEY",
        "AWS_SECRET_ACCESS_KEY",
    ],
)
def test_a_telling_name_is_enough(name: str) -> None:
    assert is_secret("correct horse", name)
    assert not is_secret("4096", name)
    assert not is_secret("arn:aws:secretsmanager:us-east-1:111122223333:secret:hf-AbCdEf", name)
    assert not is_secret("", name)
    assert not is_secret("false", "TOKENIZERS_PARALLELISM")


def test_a_name_that_may_be_of_a_key_is_one_where_the_value_looks_drawn_by_chance() -> None:
    assert is_secret("b293f8d6637252497d79c1d04a5e6f7788990011", "WANDB_KEY")
    assert not is_secret("correct horse", "WANDB_KEY")


def test_random_keys_are_found_nearly_always() -> None:
    rng = random.Random(7)
    plain = [drawn(LETTERS, 40, seed) for seed in range(1000)]
    coded = [base64.b64encode(rng.randbytes(30)).decode() for _ in range(1000)]
    assert sum(map(is_secret, plain)) >= 920
    assert sum(map(is_secret, coded)) >= 920


words = st.lists(
    st.sampled_from(
        [
            "llama",
            "Llama2",
            "70b",
            "trn1",
            "continued",
            "Pretraining",
            "en",
            "2026",
            "GBS512",
            "v0.1",
        ]
    ),
    min_size=1,
    max_size=8,
)
camel = st.tuples(
    st.lists(
        st.sampled_from(["Continued", "Pretraining", "llama", "Of", "Large", "Models", "XL"]),
        max_size=8,
        unique=True,
    ).map("".join),
    st.integers(0, 99999).map(str),
).map("".join)
names = st.one_of(words.map("-".join), words.map("_".join), camel)
hashes = st.integers(8, 64).flatmap(lambda n: st.text(HEX, min_size=n, max_size=n))
digits = st.text(string.digits, min_size=12, max_size=12)


@given(
    st.one_of(
        names,
        hashes,
        hashes.map("sha256:{}".format),
        st.tuples(names, hashes).map("-".join),
        st.tuples(names, hashes).map(lambda t: f"s3://{t[0].lower()[:60]}/{t[0]}/{t[1]}/"),
        st.tuples(names, st.text(LETTERS, min_size=20, max_size=40)).map(
            lambda t: f"s3://bucket/{t[0]}/{t[1]}"
        ),
        st.tuples(digits, names).map(lambda t: f"arn:aws:iam::{t[0]}:role/{t[1]}"),
        st.tuples(digits, hashes).map(
            lambda t: f"{t[0]}.dkr.ecr.us-east-1.amazonaws.com/own@sha256:{t[1]}"
        ),
        st.uuids().map(str),
        hashes.map("subnet-{}".format),
        st.lists(
            st.sampled_from(["--model-type=transformer", "--retry_failed_compilation", "-O1"])
        ).map(" ".join),
    )
)
def test_names_hashes_uris_arns_and_digests_pass(value: str) -> None:
    assert not is_secret(value)
    assert value.startswith("s3://bucket/") or hide(value) == value


def benchmark() -> ModuleType:
    path = Path(__file__).parents[3] / "scripts/benchmarks/leaks.py"
    spec = importlib.util.spec_from_file_location("secrets_benchmark", path)
    assert spec
    assert spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("library", [True, False], ids=["client", "container"])
def test_rates_on_generated_secrets_and_innocent_values(library: bool) -> None:
    """scripts/bench leaks at a twentieth of its size; the rates of the whole are in
    docs/secrets-reference.md.
    """
    bench = benchmark()
    try:
        rates = bench.measure(50, 11, library)
    finally:
        secrets.use_library(True)
    assert len(rates["secrets"]) == len(rates["innocent"]) == 20
    for kind, rate in rates["secrets"].items():
        assert min(rate.values()) >= 0.96, kind
    for kind, rate in rates["innocent"].items():
        assert max(rate.values()) <= 0.04, kind
    assert bench.mean(rates["innocent"], "found") <= 0.005


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PAD_TOKEN", "<pad>"),
        ("EOS_TOKEN", "</s>"),
        ("MAX_TOKENS", "4096"),
        ("TOKENIZER_NAME", "org/Llama-2-7b"),
        ("AUTH_TYPE", "iam"),
        ("AUTHOR", "jane"),
        ("KMS_KEY_ID", "1234abcd-12ab-34cd-56ef-1234567890ab"),
        ("PARTITION_KEY", "language_and_year"),
        ("SECRET_NAME", "team/hugging-face"),
        ("PASSES", "three"),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/secrets/token"),
        ("BYPASS", "cache"),
        ("PWD", "/opt/ml"),
        ("HF_TOKEN", "${HF_TOKEN}"),
        ("note", "the token: see the wiki"),
        ("note", "password=none"),
        ("", "https://user:${PASSWORD}@host/x"),
        ("ENDPOINT", "http://localhost:8080/x@y"),
    ],
)
def test_names_that_only_sound_so_are_no_secrets(name: str, value: str) -> None:
    assert not is_secret(value, name)


@pytest.mark.parametrize(
    "text",
    ["a", "sk-", "eyJ", "https://", "token=", "x:y@", "/aB3", "-----BEGIN PRIVATE KEY", "0f"],
)
def test_long_texts_cost_bounded_work(text: str) -> None:
    """Rules that try every pair of places would take minutes for this, and hours for a long
    traceback.
    """
    hide(text * (20_000 // len(text)))


def test_what_is_told_of_a_config_is_told_in_whole() -> None:
    assert (
        hide("model.token: must name one of secret and ssm")
        == "model.token: must name one of secret and ssm"
    )
    assert hide("PGPASSWORD=hunter2 psql failed") == f"PGPASSWORD={REDACTION} psql failed"


def test_no_message_about_a_config_repeats_a_secret(raw: dict[str, Any], tmp_path: Path) -> None:
    token = ISSUED["hugging face"]
    (tmp_path / "run.yaml").write_text(
        f"model:\n  path: {raw['model']['path']}\n  token: {token}\n"
    )
    (tmp_path / "alias.yaml").write_text(f"name: *{token}\n")
    for source, set_ in (
        (tmp_path / "run.yaml", []),
        ({**raw, "train": {"lr": token}}, []),
        ({**raw, token: 1}, []),
        (raw, [f"compute.environment.HF_TOKEN={token}"]),
        (raw, [f"compute.environment {token}"]),
        (raw, [f"tags.note=see {token}"]),
        ({**raw, "tags": {token: "x"}}, []),
        ({**raw, "compute": {**raw["compute"], "environment": {token: "x"}}}, []),
        (tmp_path / "alias.yaml", []),
    ):
        with pytest.raises(smtrain.ConfigError) as caught:
            smtrain.load_config(source, set_=set_)
        assert token not in str(caught.value)


def test_the_remedy_is_a_name_and_one_name_only(raw: dict[str, Any]) -> None:
    hub = {**raw, "model": {"path": "hf://org/model@main", "token": {"secret": "hf"}}}
    assert smtrain.load_config(hub).model.token
    for token in ({}, {"secret": "a", "ssm": "b"}):
        with pytest.raises(smtrain.ConfigError, match=r"model\.token: must name one of secret"):
            smtrain.load_config({**hub, "model": {"path": "hf://org/model", "token": token}})
    with pytest.raises(
        smtrain.ConfigError, match=r"has no effect unless the model or the data is on a hub"
    ):
        smtrain.load_config({**raw, "model": {**raw["model"], "token": {"ssm": "/hf"}}})
    with pytest.raises(
        smtrain.ConfigError, match=r"must look like hf://organization/model@revision"
    ):
        smtrain.load_config({**hub, "model": {"path": "hf://model"}})


def test_no_benchmark_takes_the_name_of_a_module_of_python() -> None:
    """Their folder comes first on the path: one called secrets broke numpy, and so every other
    benchmark.
    """
    names = {path.stem for path in (Path(__file__).parents[3] / "scripts/benchmarks").glob("*.py")}
    assert names
    assert not names & sys.stdlib_module_names
