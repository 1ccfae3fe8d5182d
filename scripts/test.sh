#!/usr/bin/env bash
# Set up, and run the tests. Arguments go to pytest: -m slow, -m gpu, -m soak, a file, -k name.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
set_up requirements.txt requirements-dev.txt
exec env OMP_NUM_THREADS=1 python -m pytest "$@"
