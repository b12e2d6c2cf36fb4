"""The script that installs Neuron's driver on a node of ParallelCluster if its image has none."""

from __future__ import annotations

SCRIPT = r"""#!/bin/bash
# Neuron's driver, libraries and tools on a node of AWS ParallelCluster: its queue's CustomActions.OnNodeConfigured.
# Runs as root when a node starts, on Ubuntu and Amazon Linux 2023, and again at no harm. ROOT is for trying it.
set -euo pipefail
root=${ROOT:-}
here() { [ -e "$root/dev/neuron0" ]; }
if here; then echo "neuron: the driver is there"; exit 0; fi
. "$root/etc/os-release"
packages="aws-neuronx-dkms aws-neuronx-collectives aws-neuronx-runtime-lib aws-neuronx-tools"
case "$ID" in
ubuntu)
  from=https://apt.repos.neuron.amazonaws.com
  key=$root/etc/apt/keyrings/neuron.gpg
  mkdir -p "$root/etc/apt/keyrings" "$root/etc/apt/sources.list.d"
  curl -fsS --retry 5 "$from/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB" | gpg --batch --yes --dearmor -o "$key"
  echo "deb [signed-by=$key] $from $VERSION_CODENAME main" >"$root/etc/apt/sources.list.d/neuron.list"
  export DEBIAN_FRONTEND=noninteractive
  # A node that has just started may be updating itself.
  apt-get -q -o DPkg::Lock::Timeout=300 update
  apt-get -q -y -o DPkg::Lock::Timeout=300 install "linux-headers-$(uname -r)" $packages
  ;;
amzn)
  from=https://yum.repos.neuron.amazonaws.com
  mkdir -p "$root/etc/yum.repos.d"
  printf '[neuron]\nname=Neuron\nbaseurl=%s\nenabled=1\ngpgcheck=1\n' "$from" >"$root/etc/yum.repos.d/neuron.repo"
  rpm --import "$from/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB"
  dnf -y install "kernel-devel-$(uname -r)" "kernel-headers-$(uname -r)" $packages
  ;;
*)
  echo "neuron: there are no packages for ${PRETTY_NAME:-$ID}; take Ubuntu, Amazon Linux 2023 or an image (--ami)" >&2
  exit 1
  ;;
esac
modprobe neuron
for _ in $(seq 30); do
  if here; then echo "neuron: installed"; exit 0; fi
  sleep 1
done
echo "neuron: the driver is installed and shows no device; is this a machine with Neuron devices?" >&2
exit 1
"""
"""Sources and package names from AWS's documentation of Neuron 2.33 (read 2026-11-23); not run on a node of AWS."""
