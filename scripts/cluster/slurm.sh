#!/usr/bin/env bash
# A run on the nodes of a Slurm job. It saves before the job's time is up, and
# the job is queued again until the run is done.
#
#   sbatch --job-name first scripts/cluster/slurm.sh --preset llama3-8b,production
#   scancel --batch --signal USR1 JOB    save, and queue it again
#   scancel --batch --signal INT JOB     save and stop; the same sbatch goes on
#
# The flags after the script are train.py's; sbatch's own override the lines
# below. Submit it in Paddock's folder, on a file system that all nodes have,
# with the environment set up and the data prepared (bash scripts/run.sh
# --check). A plain scancel leaves the run KillWait seconds to save, often 30.
#
#SBATCH --job-name=paddock
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
# USR1 to this script alone, ten minutes before the end: longer than a step and a save take.
#SBATCH --signal=B:USR1@600
# Also after the loss of a node.
#SBATCH --requeue
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
set -euo pipefail
if [ -z "${SLURM_JOB_ID:-}" ] || [ ! -f scripts/launch.py ]; then
    echo "error: submit this in Paddock's folder (not $PWD): sbatch scripts/cluster/slurm.sh" >&2
    exit 2
fi
# shellcheck disable=SC1091
if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then source .venv/bin/activate; fi

# The run has the job's name. The default, the time of the start, would begin a new run at each restart.
grep -qs '^RUN_NAME=.' .env || export RUN_NAME="${RUN_NAME:-$SLURM_JOB_NAME}"
# What nodes download goes to the home folder. Another one, and none at all:
# export HF_HOME=/shared/huggingface HF_HUB_OFFLINE=1
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export MASTER_ADDR="${MASTER_ADDR:-$first}" MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
restarts=${SLURM_RESTART_COUNT:-0}
echo "$(date '+%F %T') job $SLURM_JOB_ID, restart $restarts: $SLURM_JOB_NUM_NODES nodes, the first is $MASTER_ADDR"

# A launcher on each node. When one has ended, the others have five minutes to report by themselves.
# shellcheck disable=SC2016
srun --ntasks-per-node=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --kill-on-bad-exit=0 --wait=300 \
    --output=slurm-%j-node-%n.out --open-mode=append \
    bash -c 'NODE_RANK=$SLURM_NODEID exec python scripts/launch.py --nnodes "$SLURM_JOB_NUM_NODES" "$@"' launch "$@" &
srun=$!

# srun forwards USR1 to the launchers, which save; at TERM it would kill them. Once: a second one means "without saving".
again=yes requeue=yes signalled=no
# shellcheck disable=SC2329
save() {
    again=yes
    [ "$signalled" = yes ] || kill -USR1 "$srun" || true
    signalled=yes
}
trap save USR1
trap 'requeue=no; save' INT
trap 'requeue=no again=yes' TERM  # scancel: the launchers got it too, and a cancelled job must not come back
while [ "$again" = yes ]; do  # a trap ends a wait
    again=no code=0
    wait "$srun" || code=$?
done

# 143: preempted and saved. After any other code it would fail again.
if [ "$code" = 143 ] && [ "$requeue" = yes ]; then
    if [ "$restarts" -ge "${MAX_RESTARTS:-100}" ]; then
        echo "error: this job was restarted $restarts times; submit it again, or set MAX_RESTARTS" >&2
    elif ! scontrol requeue "$SLURM_JOB_ID"; then
        echo "error: Slurm does not queue this job again; submit it again" >&2
    fi
fi
exit "$code"
