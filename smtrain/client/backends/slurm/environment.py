"""The variables of the head node's shell that travel with a job; all others stay there, as secrets may be among them.

Variables that Slurm gets go into the state folder of slurmctld and into the processes of the job.
"""

from __future__ import annotations

from smtrain.core.config.cluster import Cluster
from smtrain.core.config.slurm_options import Exported

_KEPT = (
    "HOME", "USER", "LOGNAME", "SHELL", "PATH", "LD_LIBRARY_PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ",
    "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "MODULEPATH", "MODULESHOME", "LMOD_CMD", "LMOD_DIR", "LMOD_PKG",
    "LMOD_ROOT",
)  # fmt: skip
# Variables of sbatch override the script, so one that stands for a key is kept only if the config has no value.
_DEFAULTS = ("account", "qos", "reservation", "constraint")


def kept(cluster: Cluster) -> tuple[str, ...]:
    """Names of the variables that travel with a job: what Slurm needs, and what `--export` in the config names."""
    defaults = [name.upper() for name in _DEFAULTS if not getattr(cluster, name)]
    of_slurm = [f"{program}_{name}" for name in defaults for program in ("SBATCH", "SLURM")]
    return tuple(dict.fromkeys([*_KEPT, *of_slurm, *Exported.of(cluster.sbatch).names]))


def bare(cluster: Cluster) -> str:
    """Lines of sh that define `bare COMMAND...`, which runs a command with these variables alone."""
    stays = "[!S]*|S[!B]*" if Exported.of(cluster.sbatch).everything else "''"
    return f"""keep={" ".join(kept(cluster))!r}
bare() (
  for n in $(awk 'BEGIN {{ for (n in ENVIRON) if (n ~ /^[A-Za-z_][A-Za-z0-9_]*$/) print n }}'); do
    case $n in {stays}) continue ;; esac
    case " $keep " in *" $n "*) ;; *) unset "$n" ;; esac
  done
  exec "$@"
)
"""
