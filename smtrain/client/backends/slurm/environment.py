"""The variables of the head node's shell that a job gets; all others stay there, as they may contain secrets.

Slurm writes a job's variables into slurmctld's state folder and passes them to the job's processes.
"""

from __future__ import annotations

from smtrain.core.config.cluster import Cluster
from smtrain.core.config.slurm_options import Exported

_KEPT = (
    "HOME", "USER", "LOGNAME", "SHELL", "PATH", "LD_LIBRARY_PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ",
    "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "MODULEPATH", "MODULESHOME", "LMOD_CMD", "LMOD_DIR", "LMOD_PKG",
    "LMOD_ROOT",
)  # fmt: skip
# sbatch's variables override the script, so a variable for a key is kept only if the config has no value for it.
_DEFAULTS = ("account", "qos", "reservation", "constraint")


def kept(cluster: Cluster) -> tuple[str, ...]:
    """Names of the variables that a job gets: those that Slurm needs, and those that `--export` in the config names."""
    defaults = [name.upper() for name in _DEFAULTS if not getattr(cluster, name)]
    of_slurm = [f"{program}_{name}" for name in defaults for program in ("SBATCH", "SLURM")]
    return tuple(dict.fromkeys([*_KEPT, *of_slurm, *Exported.of(cluster.sbatch).names]))


def bare(cluster: Cluster) -> str:
    """sh code that defines `bare COMMAND...`, which runs a command with only these variables."""
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
