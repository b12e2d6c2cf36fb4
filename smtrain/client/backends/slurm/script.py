"""Make a stage's sbatch script, a pure function of its request and of the section `cluster`.

It runs without smtrain on the head node: `sbatch FILE` does what a launch does once the code and
the inputs are on the shared folder. The batch shell unpacks the code, starts one runner a node,
forwards signals, and records how it ended, since accounting may be off. It needs bash 4 and Slurm
22.05 or later.

The files of a job on the shared folder:

    <shared>/<run>/jobs/<job>/request.json    the request, as CreateTrainingJob takes it
                              job.sh          the sbatch script
                              history.jsonl   what happened, one event a line
                              id              the Slurm job ID
                              stop            exists if the user asked the job to stop
                              code/           the bundle, unpacked
                              slurm.out       output of Slurm and its commands in this attempt
                              logs/algo-1.log the lines of a node, each after its time (ISO 8601,
                              UTC)
                              logs/slurm-out.log  slurm.out of earlier attempts, in the same form
                              nodes/algo-1/   the node's /opt/ml, links into the shared folder
                              output/model/   the stage's result; output/data/: its measurements

It is the layout that SageMaker uses in S3, so that one function makes both paths and URIs
(client/launch/request.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from smtrain.client.backends.slurm.paths import container_options, path_of
from smtrain.client.config.slurm_options import Exported, is_export, options_of
from smtrain.core.config.cluster import Cluster
from smtrain.core.text import shell_word
from smtrain.stages import stage_named

REQUEST, SCRIPT, HISTORY, STOP = "request.json", "job.sh", "history.jsonl", "stop"
WORDS, WORDS_LOG = "slurm.out", "slurm-out.log"
RESERVE = ".reserve"
"""Disk space reserved for the last event, so that it can be written to a full disk."""

_PASSED_VARIABLES = (
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "PATH",
    "LD_LIBRARY_PATH",
    "LANG",
    "LANGUAGE",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "SLURM_CONF",
    "SLURM_CONF_SERVER",
    "SLURM_JWT",
    "MODULEPATH",
    "MODULESHOME",
    "LMOD_CMD",
    "LMOD_DIR",
    "LMOD_PKG",
    "LMOD_ROOT",
)
# sbatch's variables override the script, so a variable for a key is kept only if the config has no
# value for it.
_DEFAULTS = ("account", "qos", "reservation", "constraint")


def exported_variables(cluster: Cluster) -> tuple[str, ...]:
    """Names of the variables that a job gets: those that Slurm needs, and those that `--export` in
    the config names.
    """
    defaults = [name.upper() for name in _DEFAULTS if not getattr(cluster, name)]
    of_slurm = [f"{program}_{name}" for name in defaults for program in ("SBATCH", "SLURM")]
    return tuple(dict.fromkeys([*_PASSED_VARIABLES, *of_slurm, *Exported.of(cluster.sbatch).names]))


def define_bare(cluster: Cluster) -> str:
    """sh code that defines `bare COMMAND...`, which runs a command with only these variables."""
    stays = "[!S]*|S[!B]*" if Exported.of(cluster.sbatch).all_variables else "''"
    return f"""keep={" ".join(exported_variables(cluster))!r}
bare() (
  for n in $(awk 'BEGIN {{ for (n in ENVIRON) if (n ~ /^[A-Za-z_][A-Za-z0-9_]*$/) print n }}'); do
    case $n in {stays}) continue ;; esac
    case " $keep " in *" $n "*) ;; *) unset "$n" ;; esac
  done
  exec "$@"
)
"""


def sbatch_script(request: Mapping[str, Any], cluster: Cluster) -> str:
    """The script for a request whose URIs are paths on the shared folder (file://)."""
    name, stage = request["TrainingJobName"], request["HyperParameters"]["stage"]
    job = f"{path_of(request['OutputDataConfig']['S3OutputPath'])}/{name}"
    channels = {
        c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"]
        for c in request["InputDataConfig"]
    }
    values = {
        "job": job,
        "stage": stage,
        "bundle": f"{path_of(channels['code'])}bundle.tar.gz",
        "restarts": str(cluster.restarts if stage_named(stage).resumable else 0),
        "goes_on": "yes" if stage_named(stage).resumable else "",
    }
    environment = {key: path_of(value) for key, value in request["Environment"].items()}
    sbatch_exports = dict(Exported.of(cluster.sbatch).values)
    exports = {
        **sbatch_exports,
        **environment,
        "TRAINING_JOB_NAME": name,
        "SMTRAIN_JOB_FOLDER": job,
    }
    return "\n".join(
        [
            "#!/bin/bash",
            *map(directive, _options(request, cluster)),
            (
                f"# smtrain: stage {stage} as job {name}. By hand: mkdir -p {shell_word(job)} &&"
                " sbatch THIS_FILE"
            ),
            *(f"{key}={shell_word(value)}" for key, value in values.items()),
            *(f"export {key}={shell_word(value)}" for key, value in sorted(exports.items())),
            _BEGIN.format(
                request=REQUEST,
                history=HISTORY,
                reserve=RESERVE,
                stop=STOP,
                words=WORDS,
                log=WORDS_LOG,
                text=json.dumps(request, indent=1),
            ),
            *environment_lines(cluster),
            *_inputs_of_s3(request, cluster),
            _STEP.format(srun=" ".join(_srun(request, cluster))),
            _END,
        ]
    )


def minutes(request: Mapping[str, Any], cluster: Cluster) -> int:
    """The time limit of one attempt in whole minutes, Slurm's unit."""
    return -(-int(cluster.time or request["StoppingCondition"]["MaxRuntimeInSeconds"]) // 60)


def _options(request: Mapping[str, Any], cluster: Cluster) -> list[str]:
    base, name = path_of(request["OutputDataConfig"]["S3OutputPath"]), request["TrainingJobName"]
    return [
        f"--job-name={name}",
        f"--nodes={request['ResourceConfig']['InstanceCount']}",
        "--ntasks-per-node=1",
        f"--time={minutes(request, cluster)}",
        f"--signal=B:USR1@{cluster.save_before}",
        "--requeue",
        "--open-mode=append",  # a requeued job continues its file
        f"--output={base}/{name}/{WORDS}",
        *node_options(request["HyperParameters"]["stage"], cluster),
    ]


def on_cpus(stage: str) -> bool:
    """True for a stage that needs no accelerator."""
    return not stage_named(stage).on_accelerators


def node_options(stage: str, cluster: Cluster) -> list[str]:
    """sbatch's options that select the nodes of a stage; used by the script and by `smtrain
    check`.
    """
    partition = (
        (cluster.cpu_partition or cluster.partition) if on_cpus(stage) else cluster.partition
    )
    option_values = {
        "partition": partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "reservation": cluster.reservation,
        "constraint": cluster.constraint,
    }
    user_options = [option for option in options_of(cluster.sbatch) if not is_export(option)]
    part = list(options_of(cluster.cpu_sbatch)) if on_cpus(stage) else []
    exports_all = Exported.of(cluster.sbatch).all_variables
    return [
        # a launch sends only these
        f"--export={'ALL' if exports_all else ','.join(exported_variables(cluster))}",
        *([] if part else ["--exclusive"]),
        # --exclusive gives a job all CPUs of its nodes, but only the partition's default memory.
        *(
            []
            if part or any(option.startswith("--mem") for option in user_options)
            else ["--mem=0"]
        ),
        *(f"--{option}={value}" for option, value in option_values.items() if value),
        *part,
        *user_options,
    ]


def directive(option: str) -> str:
    """An option of sbatch as a line of a script: sbatch parses quotes, backslashes and # there in
    its own way.
    """
    if re.fullmatch(r"[\w@%+=:,./-]+", option, re.ASCII):
        return f"#SBATCH {option}"
    quoted_option = re.sub(r"([\\\"'#])", r"\\\1", option)
    return f'#SBATCH "{quoted_option}"'


def environment_lines(cluster: Cluster) -> list[str]:
    """Shell code that selects the Python of a node as the section `cluster` says."""
    lines = [_MODULES] if cluster.modules else []
    lines += [f"module load {shell_word(module)}" for module in cluster.modules]
    if cluster.venv:
        lines.append(f"source {shell_word(cluster.venv)}/bin/activate")
    return [*lines, *cluster.setup]


def _inputs_of_s3(request: Mapping[str, Any], cluster: Cluster) -> list[str]:
    """Shell code that copies inputs from S3 to the shared folder, once, on one node."""
    uris = [
        channel["DataSource"]["S3DataSource"]["S3Uri"] for channel in request["InputDataConfig"]
    ]
    if not any(uri.startswith("s3://") for uri in uris):
        return []
    copy = [
        *_on_nodes(1, request, cluster, "--ntasks=1"),
        "python3",
        '"$job/code/entrypoints/s3_inputs.py"',
        '"$job"',
    ]
    line = " ".join([*copy, shell_word(str(cluster.shared))])
    return [f"""{line} || {{ note end ', "status": 1'; exit 1; }}"""]


def _srun(request: Mapping[str, Any], cluster: Cluster) -> list[str]:
    resume = ["--auto-resume=1"] if cluster.hyperpod else []
    srun = _on_nodes(request["ResourceConfig"]["InstanceCount"], request, cluster, *resume)
    return [*srun, "python3", '"$job/code/entrypoints/slurm_node.py"', '"$stage"']


def _on_nodes(
    nodes: int, request: Mapping[str, Any], cluster: Cluster, *extra_options: str
) -> list[str]:
    """The beginning of a command that runs once on each node, in the container if there is one."""
    container, command_prefix = container_options(request, cluster)
    options = [
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        *extra_options,
        *container,
    ]
    return ["srun", *options, *map(shell_word, options_of(cluster.srun)), *command_prefix]


# The shell function `module` is not passed to a job; these files define it.
_MODULES = """\
if ! type module >/dev/null 2>&1; then
  for init in "$MODULESHOME/init/bash" "$LMOD_PKG/init/bash" /etc/profile.d/{modules,lmod,z00_lmod}.sh \\
    /usr/share/{modules,Modules,lmod/lmod}/init/bash; do
    if [ -r "$init" ]; then . "$init"; break; fi
  done
fi"""


_BEGIN = """\
note() {{
  [ "$1" = start ] || rm -f "$job/{reserve}"  # so that an end can be written to a full disk
  printf '{{"at": %s, "event": "%s", "id": "%s"%s}}\\n' "$(date +%s)" "$1" "$SLURM_JOB_ID" "${{2:-}}" >>"$job/{history}"
}}
lost() {{
  mkdir -p "$job/nodes/algo-1/output"; echo "$1" >"$job/nodes/algo-1/output/failure"
  note end ', "status": 1'
  exit 1
}}
mkdir -p "$job/logs" "$job/output/model" "$job/output/data"
if [ -s "$job/{words}" ]; then  # of the attempt before
  at=$(date -u -r "$job/{words}" +%FT%T.000Z)
  sed "s/^/$at /" "$job/{words}" >>"$job/logs/{log}" && : >"$job/{words}"
fi
export SLURM_EXPORT_ENV=ALL  # of srun: the stage needs what this script exports
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun reads only this, from 22.05 on
if [ ! -e "$job/{request}" ]; then cat >"$job/{request}" <<'END_OF_REQUEST'
{text}
END_OF_REQUEST
fi
if [ -e "$job/{stop}" ]; then note stopped; exit 3; fi
head -c 65536 /dev/zero 2>/dev/null >"$job/{reserve}"
note start ", \\"restart\\": ${{SLURM_RESTART_COUNT:-0}}, \\"nodes\\": \\"$SLURM_JOB_NODELIST\\""
words=$( (rm -rf "$job/code" && mkdir "$job/code" && tar -xzf "$bundle" -C "$job/code") 2>&1) ||
  lost "$bundle cannot be unpacked (${{words%%$'\\n'*}}); a launch by the same version of smtrain copies it there"
ulimit -n 65535 2>/dev/null
ulimit -l unlimited 2>/dev/null
export SMTRAIN_MASTER_PORT=${{SMTRAIN_MASTER_PORT:-$((20000 + SLURM_JOB_ID % 12000))}}"""

# USR1 comes from Slurm before the time limit, USR2 from `smtrain stop`, TERM if Slurm itself ends
# or requeues the job. A shell runs a trap only after the foreground command has ended, so srun runs
# in the background and is waited for. The tasks get the signal: srun itself would kill them on
# SIGTERM (seen with 22.05).
_STEP = """\
why=
shell_told=
step=
rm -f "$job"/nodes/*/told
ask() {{
  for _ in $(seq 60); do  # slurmctld may be away, and a node that has not begun yet hears nothing
    scancel --quiet --signal=TERM "$SLURM_JOB_ID"
    sleep 5
    ls "$job"/nodes/*/told >/dev/null 2>&1 && break
    kill -0 "$step" 2>/dev/null || break
  done
}}
told() {{ why=${{why:-$1}}; heard=yes; [ -z "$step" ] || ask & }}
trap 'told limit' USR1
trap 'told asked' USR2
trap 'why=${{why:-slurm}}; shell_told=yes; heard=yes' TERM
{srun} &
step=$!
[ -z "$why" ] || ask &
while :; do
  heard=
  wait "$step"
  status=$?
  [ -n "$heard" ] || break
done"""

_END = r"""reached=$(sed -n -e 's/^[^ ]* step=\([0-9][0-9]*\) .*/\1/p' -e 's/^[^ ]* checkpoint of step \([0-9]*\) saved .*/\1/p' \
  "$job/logs/algo-1.log" 2>/dev/null | tail -n 1)
step_at() { grep "\"event\": \"again\".*\"why\": \"$1\"" "$job/history.jsonl" | tail -n 1 | sed 's/.*"step": "\([0-9]*\)".*/\1/'; }
failures=$(grep -c '"event": "again".*"why": "failed"' "$job/history.jsonl")
again() {
  note again ", \"why\": \"$1\", \"status\": $status, \"step\": \"$reached\""
  heard=
  for _ in $(seq 60); do  # slurmctld may be away; after the loss of a node, it requeues the job by itself
    if scontrol requeue "$SLURM_JOB_ID"; then sleep 300 & wait $!; exit 0; fi
    sleep 5 & wait $!
    [ -z "$heard" ] || exit 0
  done
  note end ", \"status\": 1, \"why\": \"no requeue\""
  exit 1
}
# Slurm tells all nodes to end when it cancels or requeues a job, and the others when the program has failed on one.
if [ -e "$job/nodes/algo-1/told" ] && ! ls "$job"/nodes/*/failed >/dev/null 2>&1; then why=${why:-slurm}; fi
# Told while Slurm has the job as running: it was not cancelled. The notice of a preemption, a signal by hand, one whose
# sender was not found (seen on 22.05, some time after a lost node was back): it resumes.
if [ "$why" = slurm ] && [ -z "$shell_told" ] && [ -n "$goes_on" ] && [ "$reached" != "$(step_at told)" ] &&
  [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T 2>/dev/null)" = RUNNING ]; then again told; fi
if [ "$why" = asked ]; then note stopped ", \"status\": $status"; exit 3; fi
if [ "$why" = slurm ]; then note left ", \"status\": $status"; exit 3; fi
if [ "$why" = limit ] && [ "$stage" != train ] && [ -n "$goes_on" ]; then again limit; fi
if [ "$why" = limit ] && [ "$stage" = train ] && [ -n "$reached" ] && [ "$reached" != "$(step_at limit)" ]; then again limit; fi
if [ "$why" = limit ]; then note end ", \"status\": 1, \"why\": \"limit\""; exit 1; fi
if [ "$status" -ne 0 ] && [ -n "$reached" ] && [ "$reached" != "$(step_at failed)" ] && [ "$failures" -lt "$restarts" ]; then
  again failed
fi
note end ", \"status\": $status"
exit "$status"
"""  # noqa: E501
