#!/usr/bin/env bash
# Set up, prepare the data that the settings name, and train on all GPUs, or
# on the CPU if there is none.
#
#   bash scripts/run.sh                     the embedded sample, without .env
#   bash scripts/run.sh --preset llama3.2-1b,production
#   bash scripts/run.sh --source 'corpus/*.jsonl' --gpus idle:2
#   NPROC=2 bash scripts/run.sh             two ranks
#
# It is scripts/run.py in an environment that it makes; once that exists,
# .venv/bin/python scripts/run.py --help tells more.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
set_up requirements.txt
exec python scripts/run.py "$@"
