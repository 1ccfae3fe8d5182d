#!/usr/bin/env bash
# Set up and train: bash scripts/run.sh does what ./paddock train does.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
exec ./paddock train "$@"
