#!/usr/bin/env bash
# Set up and train, as ./paddock train does.
#
#   bash scripts/run.sh                     the embedded sample, without .env
#   bash scripts/run.sh --preset llama3.2-1b,production
#   bash scripts/run.sh --source 'corpus/*.jsonl' --gpus idle:2
#   NPROC=2 bash scripts/run.sh             two ranks
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
exec ./paddock train "$@"
