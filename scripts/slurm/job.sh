# shellcheck shell=bash
# job.sh: what the Slurm files share; sourced by them. Runs "$@", one of scripts/run_*.sh, with srun as its launcher.
# USR1, which Slurm sends before the time is up and `scancel --batch --signal=USR1 JOB` at any time, is passed on: the ranks save and end
# with 138, and the job goes to the queue again. Then it goes on from the checkpoint, because run.sh resumes where there is one.
set -uo pipefail
[ $# -gt 0 ] || { echo "usage: sbatch ${SLURM_JOB_NAME:-scripts/slurm/one_node.sbatch} scripts/run_1.1b.sh [FLAG...]" >&2 && exit 2; }
export GPUS=$SLURM_NTASKS GPUS_PER_NODE=$((SLURM_NTASKS / SLURM_JOB_NUM_NODES))
# Rank = dp * T + tp, in blocks: the T ranks of a tensor-parallel group are on one node. A rank that dies must not be waited for.
export LAUNCH="srun --mpi=${SLURM_MPI_TYPE:-pmix} --distribution=block:block --kill-on-bad-exit=1 --cpu-bind=none"

"$@" &
run=$!
trap 'kill -USR1 $run' USR1
while kill -0 $run 2> /dev/null; do wait $run; done  # a trap ends a wait
wait $run
code=$?
[ $code -eq 138 ] || exit $code
echo "job.sh: saved; job $SLURM_JOB_ID goes to the queue again"
scontrol requeue "$SLURM_JOB_ID"
