"""Make the CloudFormation template of a cluster's network: what `smtrain cluster template` needs of
an account.

One VPC with a public subnet (head node) and a private one (all other nodes, which reach the
internet through a NAT gateway), both in one zone, because EFA connects nodes of one subnet only. S3
is reached by a gateway endpoint, so that data and checkpoints do not pass the NAT gateway. Resource
types as in CloudFormation's schemas (cfn-lint 1.58, read 2026-11-26); no stack was created with it
here.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Any

from smtrain.core.config import JobConfig
from smtrain.core.errors import ConfigError
from smtrain.core.facts.name_suggestions import region_meant

HEAD_OUTPUT, COMPUTE_OUTPUT = "HeadSubnet", "ComputeSubnet"
_REGION = re.compile(r"[a-z]{2,}(-[a-z]+)+-\d+")
_ZONE_ID = re.compile(r"[a-z]{3,4}\d-az\d")
_STACK = re.compile(r"[a-zA-Z][a-zA-Z0-9-]{0,119}")
_LARGEST, _SMALLEST = 16, 24
"""Prefix lengths: AWS allows a VPC /16 to /28; a /24 leaves 123 addresses for nodes, and each of a
node's network cards takes one.
"""


@dataclass(frozen=True)
class NetworkRequest:
    """A network's region, zone and addresses."""

    region: str
    zone: str | None = None
    """Name (us-west-2d) or ID (usw2-az4) of an availability zone; None: the first that the account
    lists.
    """
    cidr: str = "10.42.0.0/16"


def stack_name(config: JobConfig) -> str:
    """The stack's name."""
    return f"{config.name}-network"


def network(config: JobConfig, request: NetworkRequest) -> dict[str, Any]:
    """The template as plain values. Raises `ConfigError` with every fault."""
    if faults := [
        *(region_faults(request.region) or _zone_faults(request)),
        *_faults(config, request),
    ]:
        raise ConfigError(faults, code="config.wrong_value")
    vpc_network = ipaddress.ip_network(request.cidr)
    public, private = vpc_network.subnets(prefixlen_diff=1)
    name = stack_name(config)
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": (
            f"Network of the Slurm cluster {config.name}, written by smtrain cluster network"
        ),
        **({"Parameters": {"Zone": _zone_parameter(request.zone)}} if request.zone else {}),
        "Resources": {
            "Vpc": _resource(
                "VPC",
                name,
                CidrBlock=str(vpc_network),
                EnableDnsSupport=True,
                EnableDnsHostnames=True,
            ),
            "PublicSubnet": _subnet(
                f"{name}-public", request, str(public), MapPublicIpOnLaunch=True
            ),
            "PrivateSubnet": _subnet(f"{name}-private", request, str(private)),
            **_internet(name),
            "S3Endpoint": {
                "Type": "AWS::EC2::VPCEndpoint",
                "Properties": {
                    "VpcId": _ref("Vpc"),
                    "VpcEndpointType": "Gateway",
                    "ServiceName": {"Fn::Sub": "com.amazonaws.${AWS::Region}.s3"},
                    "RouteTableIds": [_ref("PublicRoutes"), _ref("PrivateRoutes")],
                },
            },
        },
        "Outputs": {
            HEAD_OUTPUT: {"Description": "For --head-subnet", "Value": _ref("PublicSubnet")},
            COMPUTE_OUTPUT: {"Description": "For --compute-subnet", "Value": _ref("PrivateSubnet")},
            "Vpc": {"Description": "The VPC", "Value": _ref("Vpc")},
        },
    }


def commands(config: JobConfig, request: NetworkRequest, file: str = "network.yaml") -> list[str]:
    """The commands that create the network, read its subnets, write the cluster's file with them,
    and delete it.
    """
    stack = f"--region {request.region} --stack-name {stack_name(config)}"
    ids = {
        option: (
            f"$(aws cloudformation describe-stacks {stack} --output text "
            f"--query \"Stacks[0].Outputs[?OutputKey=='{output}'].OutputValue\")"
        )
        for option, output in (("--head-subnet", HEAD_OUTPUT), ("--compute-subnet", COMPUTE_OUTPUT))
    }
    return [
        f"aws cloudformation deploy {stack} --template-file {file}",
        f"aws cloudformation describe-stacks {stack} --query 'Stacks[0].Outputs' --output table",
        f"smtrain cluster template CONFIG --region {request.region} "
        + " ".join(f'{option} "{value}"' for option, value in ids.items()),
        f"aws cloudformation delete-stack {stack}",
    ]


def zones_command(config: JobConfig, region: str) -> str:
    """The command that lists the zones of a region that have the config's machines; they differ by
    account.
    """
    kind = config.compute.instance_type.removeprefix("ml.")
    return (
        f"aws ec2 describe-instance-type-offerings --region {region} --location-type"
        f" availability-zone-id --filters Name=instance-type,Values={kind} --query"
        " 'InstanceTypeOfferings[].Location' --output text"
    )


def region_faults(region: str) -> list[str]:
    """A sentence if this cannot be a region's name."""
    if _REGION.fullmatch(region):
        return []
    meant = region_meant(region)
    remedy = f"did you mean {meant}?" if meant else "name one such as us-west-2"
    return [f"--region: {region} is not a region of AWS; {remedy}"]


def _zone_faults(request: NetworkRequest) -> list[str]:
    zone = request.zone
    if zone is None or re.fullmatch(rf"{re.escape(request.region)}[a-z]|{_ZONE_ID.pattern}", zone):
        return []
    return [
        f"--zone: {zone} is not a zone of {request.region}; name one such as {request.region}a, or"
        " an ID such as usw2-az4"
    ]


def _faults(config: JobConfig, request: NetworkRequest) -> list[str]:
    faults = []
    try:
        vpc_network = ipaddress.ip_network(request.cidr)
        private = (
            vpc_network.version == 4
            and vpc_network.is_private
            and _LARGEST <= vpc_network.prefixlen <= _SMALLEST
        )
    except ValueError:
        private = False
    if not private:
        faults.append(
            f"--cidr: {request.cidr} is not a block of private addresses of /{_LARGEST} to"
            f" /{_SMALLEST}; give one such as 10.42.0.0/16"
        )
    if not _STACK.fullmatch(stack_name(config)):
        faults.append(
            f"name: {config.name!r} is not a valid name of a stack; use at most 112 letters, digits"
            " and hyphens, beginning with a letter"
        )
    return faults


def _ref(name: str) -> dict[str, str]:
    return {"Ref": name}


def _resource(kind: str, name: str, **properties: Any) -> dict[str, Any]:
    """A resource of EC2 with its name as a tag."""
    return {
        "Type": f"AWS::EC2::{kind}",
        "Properties": {**properties, "Tags": [{"Key": "Name", "Value": name}]},
    }


def _subnet(name: str, request: NetworkRequest, cidr: str, **properties: Any) -> dict[str, Any]:
    zone: dict[str, Any] = {"AvailabilityZone": {"Fn::Select": [0, {"Fn::GetAZs": ""}]}}
    if request.zone:
        by_id = _ZONE_ID.fullmatch(request.zone)
        zone = {"AvailabilityZoneId" if by_id else "AvailabilityZone": _ref("Zone")}
    return _resource("Subnet", name, VpcId=_ref("Vpc"), CidrBlock=cidr, **zone, **properties)


def _zone_parameter(zone: str) -> dict[str, str]:
    """A parameter, so that the file can be used in another zone."""
    kind = "String" if _ZONE_ID.fullmatch(zone) else "AWS::EC2::AvailabilityZone::Name"
    return {"Type": kind, "Default": zone}


def _internet(name: str) -> dict[str, Any]:
    """The gateways, and a route table for each subnet: to the internet, and to it through NAT."""
    resources: dict[str, Any] = {
        "InternetGateway": _resource("InternetGateway", name),
        "GatewayAttachment": {
            "Type": "AWS::EC2::VPCGatewayAttachment",
            "Properties": {"VpcId": _ref("Vpc"), "InternetGatewayId": _ref("InternetGateway")},
        },
        "NatAddress": {**_resource("EIP", name, Domain="vpc"), "DependsOn": "GatewayAttachment"},
        "NatGateway": _resource(
            "NatGateway",
            name,
            AllocationId={"Fn::GetAtt": ["NatAddress", "AllocationId"]},
            SubnetId=_ref("PublicSubnet"),
        ),
    }
    ways: dict[str, dict[str, Any]] = {
        "Public": {"GatewayId": _ref("InternetGateway")},
        "Private": {"NatGatewayId": _ref("NatGateway")},
    }
    for subnet, gateway in ways.items():
        table = (  # no object twice: YAML would write an alias, which CloudFormation refuses
            f"{subnet}Routes"
        )
        resources[f"{subnet}Routes"] = _resource(
            "RouteTable", f"{name}-{subnet.lower()}", VpcId=_ref("Vpc")
        )
        resources[f"{subnet}Internet"] = {
            "Type": "AWS::EC2::Route",
            "Properties": {
                "RouteTableId": _ref(table),
                "DestinationCidrBlock": "0.0.0.0/0",
                **gateway,
            },
        }
        resources[f"{subnet}Association"] = {
            "Type": "AWS::EC2::SubnetRouteTableAssociation",
            "Properties": {"RouteTableId": _ref(table), "SubnetId": _ref(f"{subnet}Subnet")},
        }
    resources["PublicInternet"]["DependsOn"] = (
        "GatewayAttachment"  # AWS refuses a route to an unattached gateway
    )
    return resources
