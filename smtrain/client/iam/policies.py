"""IAM policies from a config's own requests: only the buckets, prefixes, keys and secrets in them.

Sources: "SageMaker AI Roles: CreateTrainingJob API, execution role permissions" of the SageMaker
guide for the platform's use of the role; the service authorization reference for the resources of
each action.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from smtrain.client.backends.choose import backend_of, sagemaker
from smtrain.client.config.load import Source
from smtrain.client.iam.statements import (
    Arns,
    OtherCommands,
    Statement,
    other_caller_statements,
    other_role_statements,
    serving_images,
)
from smtrain.client.launch import regions
from smtrain.client.launch.compiled_graphs import CACHES, cache_root
from smtrain.client.launch.image_pattern import is_pattern
from smtrain.client.launch.stages import Chain
from smtrain.client.planner.resolve import load_config
from smtrain.core.config import JobConfig, Stage
from smtrain.core.facts.images import EcrImage, ecr_image
from smtrain.core.protocol.owner import owner_uri
from smtrain.core.protocol.uris import split_uri
from smtrain.core.public_api import public
from smtrain.core.targets import TARGETS, TargetName
from smtrain.stages import stages_of
from smtrain.stages.base import checkpoint_uri, run_uri

Requests = Mapping[Stage, dict[str, Any]]
NO_OTHERS = OtherCommands()


def trust_policy(other_commands: OtherCommands = NO_OTHERS) -> dict[str, Any]:
    """The services that may assume the role: SageMaker, and the scheduler for an endpoint with a
    time limit.
    """
    services = other_commands.services
    principal = {"Service": services[0] if len(services) == 1 else services}
    return _policy({"Effect": "Allow", "Principal": principal, "Action": "sts:AssumeRole"})


def role_policy(
    config: JobConfig, requests: Requests, other_commands: OtherCommands = NO_OTHERS
) -> dict[str, Any]:
    """The actions of these requests' jobs with their role."""
    return _policy(
        *(statement.to_dict() for statement in role_statements(config, requests, other_commands))
    )


def caller_policy(
    config: JobConfig, requests: Requests, other_commands: OtherCommands = NO_OTHERS
) -> dict[str, Any]:
    """The actions of the user who checks, starts, follows and stops these jobs."""
    return _policy(
        *(statement.to_dict() for statement in caller_statements(config, requests, other_commands))
    )


def _policy(*statements: dict[str, Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def role_statements(
    config: JobConfig, requests: Requests, other_commands: OtherCommands = NO_OTHERS
) -> list[Statement]:
    """The execution role's permissions. `config` is resolved: it has role, region and URIs."""
    a = Arns.of(config)
    read, write_uris = _read(config, requests), _written_uris(config, requests)
    out = [
        Statement("ReadInputs", ("s3:GetObject",), tuple(_shortest(map(a.objects, read)))),
        Statement(
            "WriteResults",
            ("s3:PutObject", "s3:AbortMultipartUpload"),
            tuple(_shortest(map(a.objects, write_uris))),
        ),
        # The platform's sync deletes in S3 what a job deletes of its checkpoints, or a prepare job
        # of its parts.
        Statement(
            "PruneCheckpoints",
            ("s3:DeleteObject",),
            tuple(a.objects(uri) for uri in (checkpoint_uri(config), f"{run_uri(config)}prepare/")),
        ),
        *_listing(a, [*read, *write_uris]),
        Statement(
            "WriteLogs",
            (
                "logs:CreateLogGroup",
                "logs:CreateLogStream",
                "logs:DescribeLogStreams",
                "logs:PutLogEvents",
            ),
            (a.logs, f"{a.logs}:*"),
        ),
        Statement(
            "WriteMetrics",
            ("cloudwatch:PutMetricData",),
            ("*",),
            {"StringLike": {"cloudwatch:namespace": ["/aws/sagemaker/*"]}},
        ),
    ]
    if "train" in requests:
        # A request sent without smtrain's own launch asks whether the job that owns the checkpoints
        # has ended.
        out.append(
            Statement("AskForOwner", ("sagemaker:DescribeTrainingJob",), (a.jobs(config.name),))
        )
    if images := _images(a, requests, serving_images(config, other_commands)):
        out += [
            Statement("SignInToEcr", ("ecr:GetAuthorizationToken",), ("*",)),
            Statement(
                "PullImage",
                (
                    "ecr:BatchCheckLayerAvailability",
                    "ecr:BatchGetImage",
                    "ecr:GetDownloadUrlForLayer",
                ),
                images,
            ),
        ]
    if config.network.subnets:
        out += [
            # These actions apply to interfaces that do not exist yet.
            Statement(
                "AttachToVpc",
                (
                    "ec2:CreateNetworkInterface",
                    "ec2:CreateNetworkInterfacePermission",
                    "ec2:DeleteNetworkInterface",
                    "ec2:DeleteNetworkInterfacePermission",
                    "ec2:DescribeDhcpOptions",
                    "ec2:DescribeNetworkInterfaces",
                    "ec2:DescribeSecurityGroups",
                    "ec2:DescribeSubnets",
                    "ec2:DescribeVpcs",
                ),
                ("*",),
            ),
        ]
    if _keys(config):
        actions = (
            "kms:CreateGrant",
            "kms:Decrypt",
            "kms:DescribeKey",
            "kms:Encrypt",
            "kms:GenerateDataKey",
        )
        out += [
            a.key(f"UseKey{number or ''}", key, actions) for number, key in enumerate(_keys(config))
        ]
    if config.model.token:
        out.append(a.secret("ReadToken", config.model.token))
    return [*out, *other_role_statements(config, a, other_commands)]


def caller_statements(
    config: JobConfig, requests: Requests, other_commands: OtherCommands = NO_OTHERS
) -> list[Statement]:
    """The permissions of the user who runs smtrain with this config."""
    a = Arns.of(config)
    jobs = a.jobs(config.name)
    base = str(config.output.s3_uri).rstrip("/") + "/"
    upload_uris = [f"{base}{folder}/" for folder in ("inputs", "code", "configs")]
    read = [
        run_uri(config),
        checkpoint_uri(config),
        *(u for u in _read(config, requests) if not u.startswith(base)),
    ]
    if config.train.engine == "nxd":
        read.append(cache_root(config))  # a launch says whether it holds the graphs
    control = ["sagemaker:AddTags", "sagemaker:CreateTrainingJob", "sagemaker:DescribeTrainingJob"]
    control += ["sagemaker:ListTags", "sagemaker:StopTrainingJob"]
    if config.compute.keep_alive:
        control.append("sagemaker:UpdateTrainingJob")  # releasing a warm pool
    quotas = ("servicequotas:ListAWSDefaultServiceQuotas", "servicequotas:ListServiceQuotas")
    logs = ("logs:DescribeLogStreams", "logs:FilterLogEvents", "logs:GetLogEvents")
    role = str(config.compute.role)
    out = [
        Statement("RunJobs", tuple(sorted(control)), (jobs,)),
        Statement("FindJobs", ("sagemaker:ListTrainingJobs",), ("*",)),
        Statement(
            "PassRole",
            ("iam:PassRole",),
            (role,),
            {"StringEquals": {"iam:PassedToService": other_commands.services}},
        ),
        Statement("CheckRole", ("iam:GetRole", "iam:SimulatePrincipalPolicy"), (role,)),
        Statement("CheckQuotas", quotas, ("*",)),
        Statement(
            "Upload",
            (
                "s3:GetObject",
                "s3:PutObject",
                "s3:AbortMultipartUpload",
                "s3:ListMultipartUploadParts",
            ),
            tuple(a.objects(uri) for uri in upload_uris),
        ),
        Statement(
            "ContinueUploads", ("s3:ListBucketMultipartUploads",), (a.bucket(upload_uris[0]),)
        ),
        *_owning(config, a, requests),
        Statement("ReadResults", ("s3:GetObject",), tuple(_shortest(map(a.objects, read)))),
        *_listing(a, [*upload_uris, *read], bucket_too=True),
        Statement("ReadLogs", logs, (a.logs, f"{a.logs}:*")),
    ]
    if images := _images(a, requests):
        list_actions = ("ecr:ListImages",) if is_pattern(config.compute.image) else ()
        out.append(Statement("CheckImage", ("ecr:BatchGetImage", *list_actions), images))
    token = config.model.token
    if token and token.ssm:
        out.append(Statement("CheckToken", ("ssm:DescribeParameters",), ("*",)))
    elif token:
        out.append(
            Statement(
                "CheckToken", ("secretsmanager:DescribeSecret",), a.secret("", token).resources
            )
        )
    prices = ["pricing:GetProducts", "sagemaker:SearchTrainingPlanOfferings"]
    out.append(Statement("AskForPrices", tuple(prices), ("*",)))
    if config.compute.training_plan:
        plan = ("sagemaker:DescribeTrainingPlan", "sagemaker:ExtendTrainingPlan")
        out.append(Statement("UseTrainingPlan", plan, (config.compute.training_plan,)))
    if config.notify.sns:
        rules = ("events:PutRule", "events:PutTargets", "events:TagResource")
        out.append(Statement("TellOfTheEnd", rules, (a.rule(config.name),)))
    actions = ("kms:CreateGrant", "kms:Decrypt", "kms:DescribeKey", "kms:GenerateDataKey")
    out += [
        a.key(f"UseKey{number or ''}", key, actions) for number, key in enumerate(_keys(config))
    ]
    return [*out, *other_caller_statements(config, a, other_commands)]


def _read(config: JobConfig, requests: Requests) -> list[str]:
    """Prefixes that the jobs read; prefixes in the run's own folders are replaced by those
    folders.
    """
    base = str(config.output.s3_uri).rstrip("/") + "/"
    folders = [f"{base}{folder}/" for folder in ("inputs", "code", "configs")] + [
        run_uri(config),
        checkpoint_uri(config),
    ]
    uris = [
        channel["DataSource"]["S3DataSource"]["S3Uri"]
        for request in requests.values()
        for channel in request["InputDataConfig"]
        if "S3DataSource" in channel["DataSource"]
    ]
    used = [next((folder for folder in folders if uri.startswith(folder)), uri) for uri in uris]
    return sorted({*used, *_written_uris(config, requests)})


def _written_uris(config: JobConfig, requests: Requests) -> list[str]:
    """The run's folder, its checkpoints, and the compile cache if it is in S3."""
    caches = {
        request.get("Environment", {}).get(name, "")
        for request in requests.values()
        for name in CACHES
    }
    root = cache_root(config)  # of all shapes, or a policy would only fit one config
    cache_uris = [
        root if c.startswith(root) else f"{c.rstrip('/')}/"
        for c in sorted(caches)
        if c.startswith("s3://")
    ]
    owner = owner_uri(
        checkpoint_uri(config)
    )  # in the run's folder if the checkpoints are the run's own
    owner_uris = [] if owner.startswith(run_uri(config)) else [owner]
    return list(dict.fromkeys([run_uri(config), checkpoint_uri(config), *owner_uris, *cache_uris]))


def _listing(a: Arns, uris: list[str], *, bucket_too: bool = False) -> Iterator[Statement]:
    """ListBucket of each bucket, only below the prefixes; with `bucket_too` also HeadBucket, which
    has no prefix.
    """
    test = "StringLikeIfExists" if bucket_too else "StringLike"
    by_bucket: dict[str, set[str]] = {}
    for uri in uris:
        bucket, prefix = split_uri(uri)
        by_bucket.setdefault(bucket, set()).add(f"{prefix}*")
    for number, (bucket, prefixes) in enumerate(sorted(by_bucket.items())):
        yield Statement(
            f"List{number or ''}",
            ("s3:ListBucket",),
            (f"arn:{a.partition}:s3:::{bucket}",),
            {test: {"s3:prefix": _shortest(prefixes)}},
        )


def _owning(config: JobConfig, a: Arns, requests: Requests) -> Iterator[Statement]:
    """Own the run's checkpoints for a train job, by a record next to them."""
    if "train" in requests:
        record = a.objects(owner_uri(checkpoint_uri(config))).removesuffix("*")
        yield Statement("OwnCheckpoints", ("s3:GetObject", "s3:PutObject"), (record,))


def _shortest(patterns: Iterable[str]) -> list[str]:
    """Patterns that end in a wildcard, without those that another pattern covers."""
    shortest: list[str] = []
    for pattern in sorted(set(patterns)):
        if not shortest or not pattern.startswith(shortest[-1][:-1]):
            shortest.append(pattern)
    return shortest


def _keys(config: JobConfig) -> list[str]:
    return list(dict.fromkeys(filter(None, [config.output.kms_key, config.output.volume_kms_key])))


def _images(a: Arns, requests: Requests, extra_images: Iterable[EcrImage] = ()) -> tuple[str, ...]:
    images = [
        ecr_image(request["AlgorithmSpecification"].get("TrainingImage", ""))
        for request in requests.values()
    ]
    images += extra_images
    return tuple(
        sorted(
            {
                f"arn:{a.partition}:ecr:{m.region}:{m.account}:repository/{m.repository}"
                for m in images
                if m
            }
        )
    )


ROLE_NAME = "smtrain-training"


def trust_policy_of(
    *,
    tune: bool = False,
    endpoint: str | None = None,
    group: str | None = None,
    pipeline: str | None = None,
) -> dict[str, Any]:
    """The role's trust policy, which names no account, so AWS is not asked."""
    return trust_policy(OtherCommands(tune, endpoint, group, pipeline))


@public
def policies(
    source: Source | None = None,
    *,
    target: TargetName | None = None,
    set_: Sequence[str] = (),
    tune: bool = False,
    endpoint: str | None = None,
    group: str | None = None,
    pipeline: str | None = None,
    **sections: Any,
) -> dict[str, dict[str, Any]]:
    """Policies by `caller`, `role` and `trust`.

    `compute.role` may name a role that does not exist yet; its ARN is made with the account, for
    which AWS is asked. The default name is smtrain-training. With `tune` the policies allow
    `smtrain tune`, with `endpoint` an endpoint of this name for the model (`smtrain deploy`, `chat
    --endpoint`, `undeploy`), with `group` its registration in this model package group (`smtrain
    register`), with `pipeline` a pipeline of this name (`smtrain pipeline`). For pods of a
    Kubernetes cluster they are those of the service account's role. Raises `ConfigError`
    as loading does, and `JobError` if the account or the region is unknown.
    """
    other_commands = OtherCommands(tune, endpoint, group, pipeline)
    config = load_config(source, set_=set_, target=target, **sections)
    if TARGETS[target or config.target].pod_roles:
        from smtrain.client.iam.pods import pod_policies

        return pod_policies(config, backend_of(config, target))
    place = sagemaker(backend_of(config, target))
    name = config.compute.role or ROLE_NAME
    if place.record.rented and not name.startswith("arn:"):
        role = f"arn:aws:iam::{place.account('give compute.role as an ARN')}:role/{name}"
        config = config.model_copy(
            update={"compute": config.compute.model_copy(update={"role": role})}
        )
    chain = Chain(config, place, look=False)
    requests = {stage: chain.plan(stage).request for stage in stages_of(chain.config, place.name)}
    answers = {
        "caller": caller_policy(chain.config, requests, other_commands),
        "role": role_policy(chain.config, requests, other_commands),
        "trust": trust_policy(other_commands),
    }
    for region in chain.config.compute.fallback_regions:
        away = regions.chain_in(chain, region)
        _add_region(answers, away, {stage: away.plan(stage).request for stage in requests}, chain)
    return answers


def _add_region(
    answers: dict[str, dict[str, Any]], away: Chain, requests: Requests, home: Chain
) -> None:
    """Add the permissions for a region of compute.fallback_regions: those of a run there, and for
    the caller the copies of what the jobs read at home, and their removal.
    """
    suffix = "".join(part.title() for part in str(away.config.compute.region).split("-"))
    a = Arns.of(away.config)
    home_uris, away_root = run_uri(home.config), str(away.config.output.s3_uri)
    read = [uri for uri in _read(home.config, requests) if not uri.startswith(away_root)]
    caller = [
        *caller_statements(away.config, requests, NO_OTHERS),
        Statement(
            "CopyFrom",
            ("s3:GetObject",),
            tuple(_shortest(map(a.objects, dict.fromkeys([home_uris, *read])))),
        ),
        Statement(
            "CopyAndRemove",
            ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"),
            (a.objects(f"{away_root}/"),),
        ),
        Statement("ListCopies", ("s3:ListBucket",), (a.bucket(away_root),)),
        Statement("ReadQuotas", ("servicequotas:ListServiceQuotas",), ("*",)),
    ]
    role = [
        *role_statements(away.config, requests),
        Statement("ReadCopies", ("s3:GetObject",), (a.objects(f"{away_root}/"),)),
    ]
    for name, statements in (("caller", caller), ("role", role)):
        home_statements = answers[name]["Statement"]
        for statement in statements:
            plain = statement.to_dict()
            if not any({**plain, "Sid": entry["Sid"]} == entry for entry in home_statements):
                home_statements.append({**plain, "Sid": f"{plain['Sid']}{suffix}"})
