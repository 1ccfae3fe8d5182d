#!/usr/bin/env bash
# Set up and train every stage on sample data, as ./paddock pipeline does:
# bash scripts/run_pipeline.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
exec ./paddock pipeline "$@"
