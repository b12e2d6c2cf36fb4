"""`smtrain cluster`: the network and the file of a Slurm cluster for a config, on AWS
ParallelCluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from smtrain.cli import options
from smtrain.core.text import say

if TYPE_CHECKING:
    from smtrain.core.config import JobConfig

app = options.app()
USUAL_REGION = "us-west-2"
Region = Annotated[
    str | None,
    typer.Option(
        help=f"Region; default: compute.region, else that of the AWS profile, else {USUAL_REGION}."
    ),
]


@app.callback()
def cluster() -> None:
    """Slurm clusters.

    $ smtrain cluster template run.yaml > cluster.yaml  # a file for ParallelCluster
    """


@app.command(
    groups={
        "Network and access": "--region --head-subnet --compute-subnet --key-name",
        "Nodes": "--os --ami --post-install --capacity-block --spot --storage",
        "The config": "--set",
    }
)
def template(
    config: options.Config,
    region: Region = None,
    head_subnet: Annotated[str | None, typer.Option(help="Public subnet of the head node.")] = None,
    compute_subnet: Annotated[str | None, typer.Option(help="Private subnet of all nodes.")] = None,
    key_name: Annotated[str | None, typer.Option(help="EC2 key pair for ssh.")] = None,
    os: Annotated[
        str | None, typer.Option(help="Operating system; default: by the engine's Python.")
    ] = None,
    ami: Annotated[str | None, typer.Option(help="Neuron image for it.")] = None,
    post_install: Annotated[
        str | None,
        typer.Option(metavar="URI", help="Script that the train nodes run as they start."),
    ] = None,
    capacity_block: Annotated[
        str | None, typer.Option(metavar="ID", help="Capacity reservation of a capacity block.")
    ] = None,
    spot: Annotated[
        bool, typer.Option("--spot", help="Spot machines for the train stage.")
    ] = False,
    storage: Annotated[int, typer.Option(help="FSx for Lustre, in GiB.")] = 4800,
    set_: options.Set = None,
) -> None:
    """Print the file; its cost and the commands to run next go to stderr.

    $ smtrain cluster template run.yaml --head-subnet subnet-1 --compute-subnet subnet-2 --key-name me > c.yaml
        # with your own network
    """
    import yaml

    from smtrain.client.planner.resolve import load_config
    from smtrain.core.facts.engines import is_neuron
    from smtrain.tools.cluster.parallelcluster import UNKNOWN_SUBNET, Site, dollars_per_hour, queues
    from smtrain.tools.cluster.parallelcluster import template as make

    job_config = load_config(config, set_=set_ or (), target="slurm")
    site = Site(
        _region(region, job_config),
        head_subnet or UNKNOWN_SUBNET,
        compute_subnet or UNKNOWN_SUBNET,
        key_name,
        os,
        ami,
        post_install=post_install,
        capacity_block=capacity_block,
        spot=spot,
        storage_gib=storage,
    )
    say(yaml.safe_dump(make(job_config, site), sort_keys=False).rstrip(), raw=True)
    idle, busy = (
        f"${price:,.2f}" if price is not None else "an unknown price"
        for price in dollars_per_hour(job_config, site)
    )
    say(
        f"an hour costs {idle} while the cluster is idle, and {busy} more while the train stage"
        " runs (SageMaker's prices for machines; storage by a guess)",
        error=True,
    )
    if UNKNOWN_SUBNET in (site.head_subnet, site.compute_subnet):
        say(
            "before you use it: give --head-subnet and --compute-subnet in place of"
            f" {UNKNOWN_SUBNET} (`smtrain cluster network` makes both)",
            error=True,
        )
    if ami is None and post_install is None and is_neuron(job_config.compute.instance_type):
        say(
            "the nodes have no Neuron driver: `pcluster build-image` makes an image for --ami, and"
            " `smtrain cluster post-install` prints a script for --post-install",
            error=True,
        )
    training, cpus = queues(job_config)
    if not job_config.cluster.partition:
        say(
            f"its queues for your config: cluster.partition={training},"
            f" cluster.cpu_partition={cpus}",
            error=True,
        )
    say(
        f"next: pcluster create-cluster --cluster-name {job_config.name} --region {site.region} "
        "--cluster-configuration FILE --dryrun true",
        error=True,
    )


@app.command("network")
def print_network(
    config: options.Config,
    region: Region = None,
    zone: Annotated[
        str | None,
        typer.Option(metavar="ZONE", help="Availability zone, by name or ID; default: the first."),
    ] = None,
    cidr: Annotated[
        str, typer.Option(metavar="BLOCK", help="Addresses of the VPC.")
    ] = "10.42.0.0/16",
    set_: options.Set = None,
) -> None:
    """Print a CloudFormation template of VPC, subnets and gateways; the commands to run next go to
    stderr.

    $ smtrain cluster network run.yaml --zone us-west-2d > vpc.yaml  # VPC, subnets, gateways
    """
    import yaml

    from smtrain.client.planner.resolve import load_config
    from smtrain.tools.cluster.network import NetworkRequest, commands, network, zones_command

    job_config = load_config(
        config, set_=set_ or ()
    )  # it may be for SageMaker: the cluster does not exist yet
    request = NetworkRequest(_region(region, job_config), zone, cidr)
    say(yaml.safe_dump(network(job_config, request), sort_keys=False).rstrip(), raw=True)
    if zone is None and job_config.own_machine is None:
        say(
            "give --zone a zone that has the config's machines; zones differ by account, so list"
            f" yours: {zones_command(job_config, request.region)}",
            error=True,
        )
    create, read, use, delete = commands(job_config, request)
    say(f"create it: {create}", error=True)
    say(f"read its subnets: {read}", error=True)
    say(f"write the cluster's file: {use.replace('CONFIG', config, 1)} > cluster.yaml", error=True)
    say(f"delete it (NAT gateway and address are billed while they exist): {delete}", error=True)


def _region(region_option: str | None, job_config: JobConfig) -> str:
    """The region of a cluster: the flag, the config, the environment or profile, or a usual one."""
    from smtrain.client.backends.sagemaker.calls import named_region

    return region_option or job_config.compute.region or named_region() or USUAL_REGION


@app.command("post-install")
def print_post_install() -> None:
    """Print the script that installs Neuron's driver on a node as it starts.

    $ smtrain cluster post-install > neuron.sh  # to put on S3
    """
    from smtrain.tools.cluster.parallelcluster import NEURON_SCRIPT

    say(NEURON_SCRIPT.rstrip(), raw=True)


@app.command()
def clean(
    jobs: options.FinishedJobs = False,
    older_than: options.OlderThan = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Remove all that no running job or unfinished run needs, models and inputs too.",
        ),
    ] = False,
    run: options.OneRun = None,
    yes: options.WithoutAsking = False,
) -> None:
    """Show what smtrain has made in the shared folder of the cluster used last, and remove what is
    asked for.

    Keeps files that a running job or an unfinished run needs, and all files of other programs and
    users.

    $ smtrain cluster clean  # only look
    $ smtrain cluster clean --older-than 7d  # remove what is older
    """
    from smtrain.client.backends.slurm.backend import SlurmBackend
    from smtrain.client.backends.slurm.cleaning import KINDS, list_files, plan, remove
    from smtrain.client.backends.slurm.registry import REGISTRY
    from smtrain.core.config.units import spell_bytes

    age, place = options.age_of(older_than), SlurmBackend(REGISTRY.section_of())
    shared_folder = list_files(place)
    sizes = shared_folder.sizes()
    for kind, size in sizes.items():
        if size:
            say(f"{spell_bytes(size):>9}  {kind}: {KINDS[kind]}")
    say(
        f"{spell_bytes(sum(sizes.values())):>9}  by smtrain in {place.shared_folder}"
        f" ({place.head.name})"
    )
    if not options.is_named(jobs, age, everything, run or None):
        return
    removal, units = plan(
        shared_folder, jobs=jobs or age is not None, older_than=age, everything=everything, run=run
    )
    for unit in units:
        say(f"to go: {spell_bytes(unit.size):>9}  {unit.path}")
    options.say_kept(removal.retained_runs)
    if not units:
        say("nothing to remove")
    elif options.may_remove(yes):
        say(f"{spell_bytes(remove(place, removal, units))} freed")
