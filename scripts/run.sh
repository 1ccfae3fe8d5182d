#!/usr/bin/env bash
# Set up, prepare the data, and train on all GPUs, or on the CPU if there is none. NPROC=N starts N ranks.
# All flags go to train.py. Without .env, --preset, --config and --env-file it trains the embedded sample.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
set_up requirements.txt

preset=$(python -c 'import sys; from settings.load import peek; print(peek(sys.argv[1:])[0])' "$@")
own_settings=no check=no
[ -e .env ] || [ -n "${PRETRAIN_DATA_PATH:-}" ] && own_settings=yes
for flag in "$@"; do
    case "$flag" in
        --config* | --env-file* | --env_file* | --pretrain-data-path* | --pretrain_data_path*) own_settings=yes ;;
        --check) check=yes ;;
    esac
done
if [ "$own_settings" = no ] && [[ ",$preset," != *,sample,* ]]; then
    preset=sample${preset:+,$preset}
    set -- "$@" --preset "$preset"
fi
if [[ ",$preset," == *,sample,* ]]; then
    cat <<'END'
Paddock's embedded sample: a small Llama 3 learns to read and write stories of a made-up world, from random weights.
It takes four to five minutes on two CPU cores, less on a GPU. During training it is asked which of four endings
fits a story that it has not seen; guessing gives 25 %. At the end it writes stories of its own and saves a model
folder, from which training can continue.
END
    python scripts/make_sample.py
fi

# The GPUs that torch sees with the environment variables of .env.
ranks=${NPROC:-$(python -c 'import os, sys; from settings.load import peek; os.environ.update(peek(sys.argv[1:])[1])
import torch; print(torch.cuda.device_count())' "$@")}
if [ "$check" = yes ]; then
    exec env WORLD_SIZE="${WORLD_SIZE:-$((ranks > 1 ? ranks : 1))}" python train.py "$@"
elif [ "$ranks" -gt 1 ]; then
    exec python scripts/launch.py --nproc-per-node "$ranks" "$@"
fi
exec python train.py "$@"
