"""Measure how well secrets are told from innocent values: 20 kinds of each, 20,000 values, refused
and hidden, by kind.

    scripts/bench leaks [--json] [--count 1000] [--seed 0]

A secret is `found` if a config that holds it is refused (its name is part of the config), and
`hidden` if an error message that repeats it no longer contains it. The rates without the library
(detect-secrets) are those of a container.
"""

# ruff: noqa: E501 - the table of generators is easiest to read with one per line

from __future__ import annotations

import argparse
import base64
import json
import random
import string
import sys
import uuid
from collections.abc import Callable

from smtrain.core.config import secrets

LETTERS, DIGITS = string.ascii_letters, string.digits
ALNUM, HEX, BASE64 = LETTERS + DIGITS, "0123456789abcdef", LETTERS + DIGITS + "+/"
Make = Callable[[random.Random], tuple[str, str, str]]
"""Returns (name, value, the part of the value that must be hidden)."""
PLAIN_NAMES = ("NOTE", "RUN_OPTION", "value", "EXTRA", "owner", "STAGE_ARGUMENT", "config", "")
_TEXT = (
    "llama mistral qwen corpus wiki english shard tokens data train model base instruct chat large"
    " small web crawl code math science books news multilingual filtered cleaned dedup sample final"
    " test neuron trainium cluster batch step checkpoint export prepare convert generate config"
    " project team research language continued pretraining experiment"
)
WORDS = _TEXT.split()


def draw(rng: random.Random, alphabet: str, length: int) -> str:
    return "".join(rng.choices(alphabet, k=length))


def make_with_prefix(
    prefix: str, alphabet: str, length: int, names: tuple[str, ...] = PLAIN_NAMES
) -> Make:
    def make(rng: random.Random) -> tuple[str, str, str]:
        value = prefix + draw(rng, alphabet, length)
        return rng.choice(names), value, value

    return make


def password(rng: random.Random) -> str:
    """A password as people and generators make it."""
    return rng.choice(
        [
            lambda: (
                rng.choice(WORDS).capitalize() + str(rng.randrange(1, 9999)) + rng.choice("!$#%?")
            ),
            lambda: "-".join(rng.choices(WORDS, k=4)),
            lambda: draw(rng, ALNUM + "!$%^&*_-=", rng.randrange(8, 25)),
            lambda: draw(rng, ALNUM, 16),
        ]
    )()


def url_password(rng: random.Random) -> tuple[str, str, str]:
    scheme = rng.choice(
        [
            "postgres",
            "postgresql+psycopg",
            "mysql",
            "mongodb+srv",
            "redis",
            "amqps",
            "https",
            "http",
            "ftp",
            "ldap",
            "smtp",
        ]
    )
    word = draw(rng, ALNUM + "!$%^&*_-=.", rng.randrange(8, 25))
    user = "" if scheme == "redis" and rng.random() < 0.5 else rng.choice(WORDS)
    return (
        rng.choice((*PLAIN_NAMES, "DATABASE_URL")),
        f"{scheme}://{user}:{word}@db.example.com:5432/x",
        word,
    )


def make_by_name(*names: str) -> Make:
    def make(rng: random.Random) -> tuple[str, str, str]:
        value = password(rng)
        return rng.choice(names), value, value

    return make


def named_key(*names: str) -> Make:
    def make(rng: random.Random) -> tuple[str, str, str]:
        value = rng.choice(
            [draw(rng, HEX, 40), draw(rng, ALNUM, 32), draw(rng, BASE64, 40), draw(rng, HEX, 32)]
        )
        return rng.choice(names), value, value

    return make


def authorization(rng: random.Random) -> tuple[str, str, str]:
    token = rng.choice(
        [base64.b64encode(rng.randbytes(24)).decode(), draw(rng, ALNUM, 32), draw(rng, HEX, 40)]
    )
    return (
        rng.choice(["AUTHORIZATION", "HEADER", "NOTE"]),
        f"{rng.choice(['Bearer', 'Basic', 'token'])} {token}",
        token,
    )


def jwt(rng: random.Random) -> tuple[str, str, str]:
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').decode().rstrip("=")
    body = (
        base64.urlsafe_b64encode(json.dumps({"sub": str(rng.random())}).encode())
        .decode()
        .rstrip("=")
    )
    value = f"{head}.{body}.{draw(rng, ALNUM + '-_', 43)}"
    return rng.choice(PLAIN_NAMES), value, value


def webhook(rng: random.Random) -> tuple[str, str, str]:
    tail = draw(rng, ALNUM, 24)
    return (
        rng.choice((*PLAIN_NAMES, "ALERT_URL")),
        rng.choice(
            [
                (
                    f"https://hooks.slack.com/services/T{draw(rng, ALNUM[26:], 8)}/B{draw(rng, ALNUM[26:], 8)}/{tail}"
                ),
                f"https://discord.com/api/webhooks/{draw(rng, DIGITS, 18)}/{tail}",
                f"https://example.webhook.office.com/webhookb2/{uuid.UUID(int=rng.getrandbits(128))}@x/IncomingWebhook/{tail}",
                f"https://outlook.office.com/webhook/{tail}",
                f"https://hooks.zapier.com/hooks/catch/123456/{tail}",
            ]
        ),
        tail,
    )


def make_presigned_url(rng: random.Random) -> tuple[str, str, str]:
    hex_signature, base64_signature = (
        draw(rng, HEX, 64),
        base64.b64encode(rng.randbytes(20)).decode().replace("+", "%2B"),
    )
    value, part = rng.choice(
        [
            (
                f"https://b.s3.amazonaws.com/k?X-Amz-Credential=x&X-Amz-Date=20261121T000000Z&X-Amz-Signature={hex_signature}",
                hex_signature,
            ),
            (
                f"https://b.s3.amazonaws.com/k?AWSAccessKeyId=x&Expires=1795262400&Signature={base64_signature}",
                base64_signature,
            ),
            (
                f"https://a.blob.core.windows.net/c/k?sv=2024-01-01&se=2027&sp=r&sig={base64_signature}",
                base64_signature,
            ),
            (
                f"https://storage.googleapis.com/b/k?X-Goog-Algorithm=x&X-Goog-Signature={hex_signature}",
                hex_signature,
            ),
        ]
    )
    return rng.choice((*PLAIN_NAMES, "DATA_URL")), value, part


def pem(rng: random.Random) -> tuple[str, str, str]:
    kind = rng.choice(["RSA ", "", "EC ", "OPENSSH ", "ENCRYPTED "])
    body = "\n".join(draw(rng, BASE64, 64) for _ in range(4))
    return (
        rng.choice(PLAIN_NAMES),
        f"-----BEGIN {kind}PRIVATE KEY-----\n{body}\n-----END {kind}PRIVATE KEY-----",
        body,
    )


def services(rng: random.Random) -> tuple[str, str, str]:
    value = rng.choice(
        [
            "sk_live_" + draw(rng, ALNUM, 24),
            "SG." + draw(rng, ALNUM, 22) + "." + draw(rng, ALNUM, 43),
            "npm_" + draw(rng, ALNUM, 36),
            "pypi-AgEIcHlwaS5vcmc" + draw(rng, ALNUM, 70),
            "AIza" + draw(rng, ALNUM, 35),
            "SK" + draw(rng, HEX, 32),
            f"{draw(rng, DIGITS, 9)}:AA{draw(rng, ALNUM, 33)}",
            "dckr_pat_" + draw(rng, ALNUM, 27),
            "sq0csp-" + draw(rng, ALNUM, 43),
            draw(rng, HEX, 32) + "-us12",
            "dapi" + draw(rng, HEX, 32),
        ]
    )
    return rng.choice(PLAIN_NAMES), value, value


def connection(rng: random.Random) -> tuple[str, str, str]:
    word = draw(rng, ALNUM, 16)
    key = base64.b64encode(rng.randbytes(64)).decode()
    value, part = rng.choice(
        [
            (f"Server=db;Database=x;User Id=me;Password={word};", word),
            (
                f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={key};EndpointSuffix=core.windows.net",
                key,
            ),
            (f"host=db user=me password={word} dbname=x", word),
            (f"--api-key={word} --steps 5", word),
            (f'{{"user": "me", "password": "{word}"}}', word),
        ]
    )
    return rng.choice(PLAIN_NAMES), value, part


def slack(r: random.Random) -> tuple[str, str, str]:
    token = f"xoxb-{draw(r, DIGITS, 12)}-{draw(r, ALNUM, 24)}"
    return r.choice(PLAIN_NAMES), token, token


SECRETS: dict[str, Make] = {
    "Hugging Face token": make_with_prefix("hf_", LETTERS, 34),
    "AWS access key id": make_with_prefix("AKIA", string.ascii_uppercase + "234567", 16),
    "AWS secret key, named": make_with_prefix(
        "", BASE64, 40, ("AWS_SECRET_ACCESS_KEY", "SECRETKEY", "SECRET_KEY", "aws_secret")
    ),
    "AWS secret key, any name": make_with_prefix("", BASE64, 40),
    "AWS session token": make_with_prefix("IQoJb3JpZ2luX2Vj", BASE64, 300),
    "GitHub token": lambda r: make_with_prefix(
        *r.choice([("ghp_", ALNUM, 36), ("gho_", ALNUM, 36), ("github_pat_", ALNUM, 82)])
    )(r),
    "GitLab token": make_with_prefix("glpat-", ALNUM + "-_", 20),
    "OpenAI, Anthropic": lambda r: make_with_prefix(
        *r.choice([("sk-proj-", ALNUM, 48), ("sk-ant-api03-", ALNUM, 90)])
    )(r),
    "Slack token": slack,
    "other services": services,
    "JSON web token": jwt,
    "private key": pem,
    "password in a URL": url_password,
    "password by name": make_by_name(
        "PGPASSWORD", "DB_PASS", "MYSQL_PWD", "ADMIN_PASSWORD", "dbPassword", "REDISCLI_AUTH"
    ),
    "passphrase by name": make_by_name(
        "PASSPHRASE", "SSH_PASSPHRASE", "KEY_PASSPHRASE", "GPG_PASSPHRASE"
    ),
    "authorization": authorization,
    "key by name": named_key(
        "SECRETKEY", "HFTOKEN", "WANDB_KEY", "WANDB_API_KEY", "COMET_APIKEY", "ENCRYPTION_KEY"
    ),
    "webhook": webhook,
    "presigned URL": make_presigned_url,
    "connection string": connection,
}


def phrase(rng: random.Random, word_limit: int, joint: str) -> str:
    return joint.join(rng.choices(WORDS, k=rng.randrange(1, word_limit)))


def camel(rng: random.Random) -> str:
    return "".join(word.capitalize() for word in rng.choices(WORDS, k=rng.randrange(1, 6)))


def model_name(rng: random.Random) -> str:
    org, size = camel(rng), rng.choice(["7b", "70B", "1.1B", "0.5b", "8x7B"])
    return f"{org}/{rng.choice(WORDS).capitalize()}-{rng.randrange(1, 4)}.{rng.randrange(9)}-{size}-{camel(rng)}-GPTQ-Int4"


def arn(rng: random.Random) -> str:
    account, region = (
        draw(rng, DIGITS, 12),
        rng.choice(["us-east-1", "eu-north-1", "ap-southeast-2"]),
    )
    return rng.choice(
        [
            (
                f"arn:aws:iam::{account}:role/service-role/AmazonSageMaker-ExecutionRole-20261121T{draw(rng, DIGITS, 6)}"
            ),
            f"arn:aws:kms:{region}:{account}:key/{uuid.UUID(int=rng.getrandbits(128))}",
            (
                f"arn:aws:sagemaker:{region}:{account}:training-job/{phrase(rng, 4, '-')}-{draw(rng, HEX, 8)}"
            ),
            (
                f"arn:aws:secretsmanager:{region}:{account}:secret:{phrase(rng, 3, '/')}-{draw(rng, ALNUM, 6)}"
            ),
        ]
    )


def path(rng: random.Random) -> str:
    folders = [
        rng.choice([rng.choice(WORDS), camel(rng), phrase(rng, 3, "_"), f"v{rng.randrange(9)}"])
        for _ in range(5)
    ]
    return f"{rng.choice(['/', '', '~/', './'])}{'/'.join(folders)}/{phrase(rng, 3, '-')}-{rng.randrange(99):05}.{'jsonl'}"


INNOCENT: dict[str, Callable[[random.Random], str]] = {
    "sha256": lambda r: draw(r, HEX, 64),
    "git commit": lambda r: draw(r, HEX, 40),
    "md5, etag": lambda r: r.choice(['"{}"', "{}", "{}-12"]).format(draw(r, HEX, 32)),
    "prefixed digest": lambda r: f"{r.choice(['sha256:', 'md5:', 'sha512-'])}{draw(r, HEX, 64)}",
    "uuid": lambda r: str(uuid.UUID(int=r.getrandbits(128))),
    "arn": arn,
    "s3 uri": lambda r: (
        f"s3://{phrase(r, 4, '-')}-{draw(r, DIGITS, 12)}/{path(r).lstrip('~./')}/{draw(r, HEX, 16)}/"
    ),
    "s3 uri with a random part": lambda r: (
        f"s3://{phrase(r, 3, '-')}/{phrase(r, 3, '/')}/{draw(r, ALNUM, 22)}/x.parquet"
    ),
    "path": path,
    "image": lambda r: (
        f"{draw(r, DIGITS, 12)}.dkr.ecr.us-east-1.amazonaws.com/{phrase(r, 3, '-')}@sha256:{draw(r, HEX, 64)}"
    ),
    "model name": model_name,
    "data set name": lambda r: (
        f"{phrase(r, 3, '-')}/{camel(r)}-{r.randrange(1, 99)}{r.choice('BTM')}-{camel(r)}-v{r.randrange(9)}"
    ),
    "camel case": lambda r: f"{camel(r)}{camel(r)}{r.randrange(99999)}",
    "snake case": lambda r: f"{phrase(r, 6, '_')}_{r.randrange(9999)}",
    "job name": lambda r: (
        f"{phrase(r, 5, '-')}-{r.choice(['train', 'export'])}-{draw(r, HEX, 8)}-{r.randrange(2, 9)}"
    ),
    "AWS resource id": lambda r: (
        f"{r.choice(['subnet', 'sg', 'vpc', 'i', 'fs', 'vol', 'eni'])}-0{draw(r, HEX, 16)}"
    ),
    "time": lambda r: (
        f"2026-{r.randrange(1, 13):02}-{r.randrange(1, 29):02}T{r.randrange(24):02}:00:00.{draw(r, DIGITS, 6)}+00:00"
    ),
    "flags": lambda r: " ".join(f"--{phrase(r, 4, '-')}={r.randrange(999)}" for _ in range(4)),
    "prose": lambda r: (
        f"{phrase(r, 8, ' ').capitalize()} of run {r.randrange(999)}, see {camel(r)}"
        f" (https://example.com/{phrase(r, 4, '/')})"
    ),
    "run id": lambda r: r.choice(
        [
            draw(r, string.ascii_lowercase + DIGITS, 8),
            f"run-20261121_{draw(r, DIGITS, 6)}-{draw(r, string.ascii_lowercase + DIGITS, 8)}",
        ]
    ),
}
INNOCENT_NAMES = (
    "NOTE",
    "RUN_NAME",
    "WANDB_PROJECT",
    "project",
    "DATASET",
    "MODEL_ID",
    "COMMIT",
    "TOKENIZER_NAME",
    "NEURON_CC_FLAGS",
    "KMS_KEY_ID",
    "AUTHOR",
    "TOKENS_FILE",
    "PARTITION_KEY",
    "KEY_PREFIX",
    "owner",
    "HF_HOME",
    "",
    "",
)


def measure(count: int, seed: int, library: bool) -> dict[str, dict[str, dict[str, float]]]:
    secrets.use_library(library)
    rates: dict[str, dict[str, float]] = {}
    for number, (kind, make) in enumerate(SECRETS.items()):
        rng = random.Random(seed * 1000 + number)
        samples = [make(rng) for _ in range(count)]
        found_count = sum(secrets.is_secret(value, name) for name, value, _ in samples)
        errors = [
            (f"ValueError: could not use {name or 'it'}={value}: no", part)
            for name, value, part in samples
        ]
        leak_count = sum(part not in secrets.hide(text) for text, part in errors)
        rates[kind] = {"found": found_count / count, "hidden": leak_count / count}
    false: dict[str, dict[str, float]] = {}
    for number, (kind, make_one) in enumerate(INNOCENT.items()):
        rng = random.Random(seed * 1000 + 500 + number)
        innocent_values = [(rng.choice(INNOCENT_NAMES), make_one(rng)) for _ in range(count)]
        refused_count = sum(secrets.is_secret(value, name) for name, value in innocent_values)
        messages = [f"FileNotFoundError: {value} is not there" for _, value in innocent_values]
        changed_count = sum(secrets.hide(text) != text for text in messages)
        false[kind] = {"found": refused_count / count, "hidden": changed_count / count}
    return {"secrets": rates, "innocent": false}


def mean(rates: dict[str, dict[str, float]], figure: str) -> float:
    return sum(rate[figure] for rate in rates.values()) / len(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--count", type=int, default=1000, help="values of each kind")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    ways = {
        "client": measure(arguments.count, arguments.seed, True),
        "container": measure(arguments.count, arguments.seed, False),
    }
    summary = {
        way: {
            f"{group}_{figure}": mean(rates[group], figure)
            for group in rates
            for figure in ("found", "hidden")
        }
        for way, rates in ways.items()
    }
    if arguments.json:
        print(
            json.dumps(
                {
                    "values": arguments.count * 20,
                    "library": secrets.has_library(),
                    **summary,
                    "kinds": ways,
                }
            )
        )
        return
    if not secrets.has_library():
        print(
            "detect-secrets is not installed: the client's rates are the container's",
            file=sys.stderr,
        )
    for group in ("secrets", "innocent"):
        print(f"{group:27} {'refused':>10} {'hidden':>9}   in a container: refused, hidden")
        for kind in ways["client"][group]:
            client_rates, container_rates = (
                ways["client"][group][kind],
                ways["container"][group][kind],
            )
            print(
                f"  {kind:25} {client_rates['found']:>10.2%} {client_rates['hidden']:>9.2%}"
                f" {container_rates['found']:>14.2%} {container_rates['hidden']:>9.2%}"
            )
    for way, rates in summary.items():
        print(
            f"{way}: "
            + ", ".join(f"{name.replace('_', ' ')} {rate:.2%}" for name, rate in rates.items())
        )


if __name__ == "__main__":
    main()
