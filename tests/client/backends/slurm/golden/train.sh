#!/bin/bash
#SBATCH --job-name=llama-train-1a2b3c4d
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --time=240
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/fsx/smtrain/llama/jobs/llama-train-1a2b3c4d/slurm.out
#SBATCH --export=HOME,USER,LOGNAME,SHELL,PATH,LD_LIBRARY_PATH,LANG,LANGUAGE,LC_ALL,LC_CTYPE,TZ,SLURM_CONF,SLURM_CONF_SERVER,SLURM_JWT,MODULEPATH,MODULESHOME,LMOD_CMD,LMOD_DIR,LMOD_PKG,LMOD_ROOT
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --partition=trn1
#SBATCH --account=lab
#SBATCH --qos=high
#SBATCH --reservation=block
#SBATCH --constraint=efa
#SBATCH --mail-type=END
# smtrain: stage train as job llama-train-1a2b3c4d. By hand: mkdir -p /fsx/smtrain/llama/jobs/llama-train-1a2b3c4d && sbatch THIS_FILE
job=/fsx/smtrain/llama/jobs/llama-train-1a2b3c4d
stage=train
bundle=/fsx/smtrain/code/0123456789abcdef/bundle.tar.gz
restarts=3
goes_on=yes
export FI_PROVIDER=efa
export NOTE='it'"'"'s $HOME'
export SMTRAIN_CHECKPOINTS=/fsx/smtrain/c/
export SMTRAIN_JOB_FOLDER=/fsx/smtrain/llama/jobs/llama-train-1a2b3c4d
export TRAINING_JOB_NAME=llama-train-1a2b3c4d
note() {
  [ "$1" = start ] || rm -f "$job/.reserve"  # so that an end can be written to a full disk
  printf '{"at": %s, "event": "%s", "id": "%s"%s}\n' "$(date +%s)" "$1" "$SLURM_JOB_ID" "${2:-}" >>"$job/history.jsonl"
}
lost() {
  mkdir -p "$job/nodes/algo-1/output"; echo "$1" >"$job/nodes/algo-1/output/failure"
  note end ', "status": 1'
  exit 1
}
mkdir -p "$job/logs" "$job/output/model" "$job/output/data"
if [ -s "$job/slurm.out" ]; then  # of the attempt before
  at=$(date -u -r "$job/slurm.out" +%FT%T.000Z)
  sed "s/^/$at /" "$job/slurm.out" >>"$job/logs/slurm-out.log" && : >"$job/slurm.out"
fi
export SLURM_EXPORT_ENV=ALL  # of srun: the stage needs what this script exports
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun reads only this, from 22.05 on
if [ ! -e "$job/request.json" ]; then cat >"$job/request.json" <<'END_OF_REQUEST'
{
 "TrainingJobName": "llama-train-1a2b3c4d",
 "HyperParameters": {
  "stage": "train"
 },
 "InputDataConfig": [
  {
   "ChannelName": "code",
   "DataSource": {
    "S3DataSource": {
     "S3DataType": "S3Prefix",
     "S3Uri": "file:///fsx/smtrain/code/0123456789abcdef/"
    }
   }
  }
 ],
 "OutputDataConfig": {
  "S3OutputPath": "file:///fsx/smtrain/llama/jobs"
 },
 "ResourceConfig": {
  "InstanceType": "ml.trn1.32xlarge",
  "InstanceCount": 4
 },
 "StoppingCondition": {
  "MaxRuntimeInSeconds": 86400
 },
 "Environment": {
  "FI_PROVIDER": "efa",
  "NOTE": "it's $HOME",
  "SMTRAIN_CHECKPOINTS": "file:///fsx/smtrain/c/"
 }
}
END_OF_REQUEST
fi
if [ -e "$job/stop" ]; then note stopped; exit 3; fi
head -c 65536 /dev/zero 2>/dev/null >"$job/.reserve"
note start ", \"restart\": ${SLURM_RESTART_COUNT:-0}, \"nodes\": \"$SLURM_JOB_NODELIST\""
words=$( (rm -rf "$job/code" && mkdir "$job/code" && tar -xzf "$bundle" -C "$job/code") 2>&1) ||
  lost "$bundle cannot be unpacked (${words%%$'\n'*}); a launch by the same version of smtrain copies it there"
ulimit -n 65535 2>/dev/null
ulimit -l unlimited 2>/dev/null
export SMTRAIN_MASTER_PORT=${SMTRAIN_MASTER_PORT:-$((20000 + SLURM_JOB_ID % 12000))}
if ! type module >/dev/null 2>&1; then
  for init in "$MODULESHOME/init/bash" "$LMOD_PKG/init/bash" /etc/profile.d/{modules,lmod,z00_lmod}.sh \
    /usr/share/{modules,Modules,lmod/lmod}/init/bash; do
    if [ -r "$init" ]; then . "$init"; break; fi
  done
fi
module load python/3.11
source /fsx/venv/bin/activate
export A=1
why=
shell_told=
step=
rm -f "$job"/nodes/*/told
ask() {
  for _ in $(seq 60); do  # slurmctld may be away, and a node that has not begun yet hears nothing
    scancel --quiet --signal=TERM "$SLURM_JOB_ID"
    sleep 5
    ls "$job"/nodes/*/told >/dev/null 2>&1 && break
    kill -0 "$step" 2>/dev/null || break
  done
}
told() { why=${why:-$1}; heard=yes; [ -z "$step" ] || ask & }
trap 'told limit' USR1
trap 'told asked' USR2
trap 'why=${why:-slurm}; shell_told=yes; heard=yes' TERM
srun --nodes=4 --ntasks-per-node=1 --kill-on-bad-exit=1 --auto-resume=1 --cpu-bind=none python3 "$job/code/entrypoints/slurm_node.py" "$stage" &
step=$!
[ -z "$why" ] || ask &
while :; do
  heard=
  wait "$step"
  status=$?
  [ -n "$heard" ] || break
done
reached=$(sed -n -e 's/^[^ ]* step=\([0-9][0-9]*\) .*/\1/p' -e 's/^[^ ]* checkpoint of step \([0-9]*\) saved .*/\1/p' \
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
