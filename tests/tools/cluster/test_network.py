"""The network of a new cluster: CloudFormation's schemas, a stack made from it, and its faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from smtrain.core.errors import ConfigError
from smtrain.tools.cluster.network import NetworkRequest, commands, network, zones_command
from smtrain.tools.cluster.parallelcluster import Site, template
from tests.extras import need
from tests.tools.cluster.test_parallelcluster import config

need("cfnlint")
REQUESTS = [
    NetworkRequest("us-west-2"),
    NetworkRequest("us-east-1", "us-east-1d", "10.1.0.0/24"),
    NetworkRequest("ap-southeast-2", "apse2-az1", "172.16.0.0/20"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("request_", REQUESTS)
def test_cloudformations_schemas_take_it(
    raw: dict[str, Any], request_: NetworkRequest, tmp_path: Path
) -> None:
    from cfnlint.api import lint
    from cfnlint.config import ManualArgs

    text = yaml.safe_dump(network(config(raw), request_), sort_keys=False)
    assert [str(one) for one in lint(text, config=ManualArgs(regions=[request_.region]))] == []
    wrong = text.replace("AllocationId:", "Allocation:", 1)
    assert lint(wrong, config=ManualArgs(regions=[request_.region])), (
        "it finds a fault if there is one"
    )


@pytest.mark.full  # moto takes seconds; cfn-lint checks the template in the gate
@pytest.mark.parametrize("request_", [REQUESTS[0], REQUESTS[1]])
def test_a_stack_of_it_has_what_the_clusters_file_needs(
    raw: dict[str, Any], request_: NetworkRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With moto's CloudFormation, a stand-in of AWS's."""
    moto = pytest.importorskip("moto")
    import boto3

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    made = config(raw)
    with moto.mock_aws():
        stacks: Any = boto3.client("cloudformation", region_name=request_.region)
        stacks.create_stack(StackName="s", TemplateBody=yaml.safe_dump(network(made, request_)))
        (stack,) = stacks.describe_stacks(StackName="s")["Stacks"]
        ids = {one["OutputKey"]: one["OutputValue"] for one in stack["Outputs"]}
        machines: Any = boto3.client("ec2", region_name=request_.region)
        subnets = machines.describe_subnets(SubnetIds=[ids["HeadSubnet"], ids["ComputeSubnet"]])[
            "Subnets"
        ]
        assert {one["VpcId"] for one in subnets} == {ids["Vpc"]}
        assert len({one["AvailabilityZone"] for one in subnets}) == 1
        tables = machines.describe_route_tables(
            Filters=[{"Name": "vpc-id", "Values": [ids["Vpc"]]}]
        )["RouteTables"]
        ways = {
            name: [
                way
                for one in tables
                for way in one["Routes"]
                if str(way.get(key, "")).startswith(start)
            ]
            for name, key, start in (
                ("internet", "GatewayId", "igw-"),
                ("nat", "NatGatewayId", "nat-"),
                ("s3", "GatewayId", "vpce-"),
            )
        }
    assert {name: len(found) for name, found in ways.items()} == {"internet": 1, "nat": 1, "s3": 2}
    # moto keeps no associations of CloudFormation's, so look at the template
    links = [
        network(made, request_)["Resources"][f"{one}Association"]["Properties"]
        for one in ("Public", "Private")
    ]
    assert [one["SubnetId"]["Ref"] for one in links] == ["PublicSubnet", "PrivateSubnet"]
    assert [one["RouteTableId"]["Ref"] for one in links] == ["PublicRoutes", "PrivateRoutes"]
    file = template(made, Site(request_.region, ids["HeadSubnet"], ids["ComputeSubnet"]))
    assert file["Scheduling"]["SlurmQueues"][0]["Networking"]["SubnetIds"] == [ids["ComputeSubnet"]]
    assert all(
        "describe-stacks" in one or "-stack" in one or "deploy" in one
        for one in commands(made, request_)
    )
    assert "Values=trn1.32xlarge" in zones_command(made, request_.region)


@pytest.mark.parametrize(
    ("change", "name", "sentence"),
    [
        (
            {"region": "us-west2"},
            "tiny",
            "--region: us-west2 is not a region of AWS; did you mean us-west-2?",
        ),
        (
            {"zone": "us-east-1a"},
            "tiny",
            "--zone: us-east-1a is not a zone of us-west-2; name one such as us-west-2a",
        ),
        (
            {"cidr": "10.0.0.1/16"},
            "tiny",
            "--cidr: 10.0.0.1/16 is not a block of private addresses of /16 to /24",
        ),
        ({"cidr": "8.8.0.0/16"}, "tiny", "--cidr: 8.8.0.0/16 is not a block of private addresses"),
        ({"cidr": "fd00::/16"}, "tiny", "--cidr: fd00::/16 is not a block of private addresses"),
        ({"cidr": "10.0.0.0/8"}, "tiny", "--cidr: 10.0.0.0/8 is not a block of private addresses"),
        ({}, "1-tiny", "name: '1-tiny' is not a valid name of a stack; use at most 112 letters"),
    ],
)
def test_what_cannot_be_made_has_its_sentence(
    raw: dict[str, Any], change: dict[str, str], name: str, sentence: str
) -> None:
    made = config(raw).model_copy(update={"name": name})
    with pytest.raises(ConfigError) as refused:
        network(made, replace(REQUESTS[0], **change))
    assert [one[: len(sentence)] for one in refused.value.faults] == [sentence]
