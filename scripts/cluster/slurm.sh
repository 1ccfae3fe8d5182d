#!/usr/bin/env bash
# A training run on the nodes of a Slurm job. Each job saves before its time limit,
# requeues itself, and resumes until training is finished.
#
#   sbatch --job-name first scripts/cluster/slurm.sh --preset llama3-8b,production
#   scancel --batch --signal USR1 JOB    save and requeue
#   scancel --batch --signal INT JOB     save and stop; the same sbatch resumes
#
# Flags after the script go to train.py; sbatch flags before it override the lines
# below. Submit it from Paddock's folder on a shared file system, after setting up
# the environment and preparing the data (./paddock check). After a plain
# scancel, the run has KillWait seconds to save, often 30.
#
#SBATCH --job-name=paddock
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
# USR1 to this script only, ten minutes before the end: longer than a step and a save
#SBATCH --signal=B:USR1@600
# Requeue after a node failure too.
#SBATCH --requeue
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
set -euo pipefail
if [ -z "${SLURM_JOB_ID:-}" ] || [ ! -f scripts/launch.py ]; then
    echo "error: submit this from Paddock's folder (not $PWD): sbatch scripts/cluster/slurm.sh" >&2
    exit 2
fi
# shellcheck disable=SC1091
if [ -z "${VIRTUAL_ENV:-}" ] && [ -f .venv/bin/activate ]; then source .venv/bin/activate; fi

# Name the run after the job. The default name, the start time, would start a new run at each restart.
grep -qs '^RUN_NAME=.' .env || export RUN_NAME="${RUN_NAME:-$SLURM_JOB_NAME}"
# Nodes download to the home folder. To use another folder and forbid downloads:
# export HF_HOME=/shared/huggingface HF_HUB_OFFLINE=1
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export MASTER_ADDR="${MASTER_ADDR:-$first}" MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
restarts=${SLURM_RESTART_COUNT:-0}
echo "$(date '+%F %T') job $SLURM_JOB_ID, restart $restarts: $SLURM_JOB_NUM_NODES nodes, the first is $MASTER_ADDR"

# One launcher per node. After the first exits, the others have five minutes to report their errors.
# shellcheck disable=SC2016
srun --ntasks-per-node=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --kill-on-bad-exit=0 --wait=300 \
    --output=slurm-%j-node-%n.out --open-mode=append \
    bash -c 'NODE_RANK=$SLURM_NODEID exec python scripts/launch.py --max-restarts 3 --nnodes "$SLURM_JOB_NUM_NODES" "$@"' launch "$@" &
srun=$!

# srun forwards USR1 to the launchers, which save; TERM would kill them. A second USR1 would stop without saving.
again=yes requeue=yes signalled=no
# shellcheck disable=SC2329
save() {
    again=yes
    [ "$signalled" = yes ] || kill -USR1 "$srun" || true
    signalled=yes
}
trap save USR1
trap 'requeue=no; save' INT
trap 'requeue=no again=yes' TERM  # scancel: the launchers receive it too, and a cancelled job must not be requeued
while [ "$again" = yes ]; do  # a trap interrupts wait
    again=no code=0
    wait "$srun" || code=$?
done

# 143: preempted and saved. Other errors would recur.
if [ "$code" = 143 ] && [ "$requeue" = yes ]; then
    if [ "$restarts" -ge "${MAX_RESTARTS:-100}" ]; then
        echo "error: this job was restarted $restarts times; submit it again, or set MAX_RESTARTS" >&2
    elif scontrol requeue "$SLURM_JOB_ID"; then
        echo "saved, and requeued: nothing needs to be submitted"
    else
        echo "error: Slurm cannot requeue this job; submit it again" >&2
    fi
elif [ "$code" = 143 ]; then
    echo "stopped and saved: the same sbatch command resumes"
elif [ "$code" != 0 ]; then
    echo "error: the run ended with exit code $code; see slurm-$SLURM_JOB_ID-node-*.out" >&2
fi
exit "$code"
