#!/usr/bin/env bash
# Set up, and train every stage on the embedded sample, each measured before
# and after, a quarter of an hour on two CPU cores: ./paddock pipeline.
#
#   bash scripts/run_pipeline.sh
#   NPROC=2 bash scripts/run_pipeline.sh    on two ranks
#
# All flags are settings, and go to every training run.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
exec ./paddock pipeline "$@"
