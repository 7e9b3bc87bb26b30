#!/bin/bash
# Homogeneous job: the first nodes train, the others sample, or one node does both. Filled in by prl-submit; see slurm/README.md.
#SBATCH --job-name=golden
#SBATCH --output=/scratch/me/runs/golden/attempt_001/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=USR1@120
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=60

set -eo pipefail
trap 'echo "batch script: line $LINENO ended with code $?: $BASH_COMMAND" >&2' ERR
# lines of cluster.setup

# end of cluster.setup

export PYTHONSAFEPATH=1
export PRL_RUN=/scratch/me/runs/golden
export PRL_ATTEMPT=1
export PRL_TASK_LOGS=/scratch/me/runs/golden/attempt_001/submitit
export PYTHONPATH=/scratch/me/runs/golden/code"${PYTHONPATH:+:$PYTHONPATH}"
export SUBMITIT_EXECUTOR=slurm
# A job that follows another one in a chain, or was put into the queue again, learns which attempt it is, or that none is left to
# be made; from then on it writes to that one's log.
if [ -z "$PRL_ATTEMPT" ] || [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
  PRL_ATTEMPT=$(srun --nodes=1 --ntasks=1 --export=ALL --mpi=none --cpu-bind=none /venv/bin/python -m prl.cluster.begin | tail -n 1)
  [ -n "$PRL_ATTEMPT" ] || exit 0
  exec >>"$(printf '%s/attempt_%03d/logs/batch.log' "$PRL_RUN" "$PRL_ATTEMPT")" 2>&1
fi

# Names and addresses of all nodes, in the order of the ranks: "n1=10.0.0.1,n2=10.0.0.2"; the first 1 train.
nodes=$(scontrol -o show node "$SLURM_JOB_NODELIST" | sed -n 's/.*NodeName=\([^ ]*\) .*NodeAddr=\([^ ]*\) .*/\1=\2/p' | paste -sd,)
PRL_NODES_0=$(cut -d, -f-1 <<<"$nodes")
PRL_NODES_1=$(cut -s -d, -f$((1 + 1))- <<<"$nodes")
[ -n "$PRL_NODES_1" ] || unset PRL_NODES_1 # one node has all roles
MASTER_ADDR=${PRL_NODES_0%%,*}
MASTER_ADDR=${MASTER_ADDR#*=}
export PRL_NODES_0 ${PRL_NODES_1+PRL_NODES_1} MASTER_ADDR

# A step that asks for no CPUs has all that the job was given on its nodes, whatever the version of Slurm; the task is the only
# one there, and binds its processes itself.
unset SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK

# A node agent that was killed could not end what its children have started, nor remove temporary files and shared memory; an
# orchestrator that was killed could not say what follows, nor have the job put into the queue again.
after_step() {
  code=$?
  [ $code != 0 ] || return 0
  deaf='trap "" USR1 USR2; exec "$@"' # Slurm's warning goes to all steps
  timeout 60 srun --export=ALL --overlap --mem=0 --mpi=none --cpu-bind=none \
    bash -c "$deaf" task /venv/bin/python -m prl.orchestrator.clean_up || echo "batch script: some node was not cleaned up" >&2
  job=$(scontrol -o show job "$SLURM_JOB_ID" || true)
  then=$(timeout 120 srun --nodes=1 --ntasks=1 --export=ALL --overlap --mem=0 --mpi=none --cpu-bind=none \
    bash -c "$deaf" task /venv/bin/python -m prl.cluster.end $code "$job" | tail -n 1) || echo "batch script: what follows is not decided here" >&2
  [ "$then" != requeue ] || scontrol requeue "$SLURM_JOB_ID"
}
trap after_step EXIT

srun --export=ALL --unbuffered --kill-on-bad-exit=1 --wait=0 --mpi=none --cpu-bind=none \
  bash -c 'exec "$@" >>"$PRL_TASK_LOGS/${SLURM_JOB_ID}_${SLURM_PROCID}_log.out" 2>>"$PRL_TASK_LOGS/${SLURM_JOB_ID}_${SLURM_PROCID}_log.err"' task \
  /venv/bin/python -u -m submitit.core._submit /scratch/me/runs/golden/attempt_001/submitit
