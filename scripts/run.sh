#!/usr/bin/env bash
# Set up, prepare the data that the settings name, and train on all GPUs, or
# on the CPU if there is none: ./paddock train.
#
#   bash scripts/run.sh                     the embedded sample, without .env
#   bash scripts/run.sh --preset llama3.2-1b,production
#   bash scripts/run.sh --source 'corpus/*.jsonl' --gpus idle:2
#   NPROC=2 bash scripts/run.sh             two ranks
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
exec ./paddock train "$@"
