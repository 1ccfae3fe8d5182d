#!/usr/bin/env bash
# Every stage on the embedded sample, one after the other, each measured before and after; NPROC=2 for two ranks.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
set_up requirements.txt
exec python scripts/pipeline.py "$@"
