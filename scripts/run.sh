#!/usr/bin/env bash
# Set up, prepare what the run needs, and train on whatever is there: all GPUs, one, or the CPU.
# All flags go to train.py. Without a .env, and without --preset, --config or --env-file, it trains the embedded sample.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
set_up requirements.txt

preset=${PRESET:-}
layered=no
[ -e .env ] && layered=yes
previous=
for flag in "$@"; do
    case "$flag" in
        --preset=*) preset=${flag#*=} ;;
        --config | --config=* | --env-file | --env-file=* | --env_file | --env_file=*) layered=yes ;;
    esac
    [ "$previous" = --preset ] && preset=$flag
    previous=$flag
done
if [ -z "$preset" ] && [ "$layered" = no ]; then
    preset=sample
    set -- --preset sample "$@"
fi
if [[ ",$preset," == *,sample,* ]]; then
    cat <<'END'
Paddock's embedded sample: a small Llama 3 learns to read and write stories of a made-up world, from nothing.
It takes about five minutes on two CPU cores, less on a GPU. Every few steps it is asked which of four endings fits a story that
it has not seen: guessing gives 25 %. At the end it has written stories of its own, and a model folder to go on with.
END
    python scripts/make_sample.py
fi

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -gt 1 ]; then
    exec torchrun --standalone --nproc_per_node "$gpus" train.py "$@"
fi
exec python train.py "$@"
