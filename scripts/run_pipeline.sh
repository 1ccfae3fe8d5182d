#!/usr/bin/env bash
# Train every stage on the embedded sample, each measured before and after; NPROC=2 for two ranks.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
set_up requirements.txt
exec python scripts/pipeline.py "$@"
