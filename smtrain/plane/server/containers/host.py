"""One instance of a job as a container: the differences from a host of the sandbox."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from smtrain.plane.client import REGION
from smtrain.plane.docker import HOME, HOST, JOB
from smtrain.plane.server import pools
from smtrain.plane.server.channels import Channel
from smtrain.plane.server.containers import leftovers
from smtrain.plane.server.hosts import Host

if TYPE_CHECKING:
    from smtrain.plane.server.containers.job import JobContainers


class ContainerHost(Host):
    """A host whose leader is process 1 of a container of the request's image."""

    interface = "eth0"
    everyone = True
    containers: JobContainers

    def mountpoint(self, channel: str) -> str:
        return str(self.channel_folder(channel))

    def start_container(self, containers: JobContainers, lazy: list[Channel]) -> None:
        """Start the supervisor; a `ready` event follows, and after go() an `exit` event."""
        self.containers = containers
        algorithm = self.job.request["AlgorithmSpecification"]
        entrypoint, arguments = (
            algorithm.get("ContainerEntrypoint"),
            algorithm.get("ContainerArguments"),
        )
        fastfile = self._fastfile(lazy)
        containers.lay(self.ml)
        self._open_to_all()
        spec = {
            "ml": str(self.ml),
            "hostname": self.name,
            "package_parent": self.package_parent,
            "env": self._container_environment(),
            "fastfile": fastfile,
            "container": {
                "image": containers.image.id,
                "entrypoint": entrypoint,
                # As on AWS: `docker run IMAGE train`.
                "command": arguments or ([] if entrypoint else ["train"]),
                "labels": {
                    HOME: str(self.endpoint.home),
                    JOB: self.job.name,
                    HOST: str(self.folder),
                },
                "network": containers.network_name,
                "address": containers.addresses[self.name],
                "host": {**containers.limits(self.instance_type), "binds": self._binds()},
            },
        }
        self._launch("smtrain.plane.server.containers.supervisor", spec)

    def _binds(self) -> dict[str, dict[str, str]]:
        lent_mounts = {folder: {"bind": folder, "mode": "ro"} for folder in self.containers.folders}
        return {str(self.ml): {"bind": "/opt/ml", "mode": "rw"}, **lent_mounts}

    def _container_environment(self) -> dict[str, str]:
        """Variables that the service sets over the image's own, and those to reach S3."""
        return {
            **self.containers.environment(),
            **(
                {pools.VARIABLE: f"/opt/ml/{pools.CACHE}"}
                if pools.keep_alive(self.job.request)
                else {}
            ),
            **(self.job.request.get("Environment") or {}),
            "TRAINING_JOB_NAME": self.job.name,
            "TRAINING_JOB_ARN": self.job.arn,
            "AWS_REGION": REGION,
        }

    def _open_to_all(self) -> None:
        """Let any user read and write /opt/ml, as an image may have any; other users of this
        machine cannot enter the folder above.
        """
        for parent, folders, files in os.walk(self.ml):
            os.chmod(parent, 0o777)  # noqa: S103
            for name in files:
                path = os.path.join(parent, name)
                if not os.path.islink(path):
                    os.chmod(path, 0o666 | os.stat(path).st_mode & 0o111)  # noqa: S103
            folders[:] = [
                name for name in folders if not os.path.ismount(os.path.join(parent, name))
            ]

    def _end_rest(self) -> None:
        super()._end_rest()
        leftovers.unmount(self.folder)
        containers: Any = getattr(self, "containers", None)
        if containers:
            containers.remove_host(self.folder)
