#!/usr/bin/env bash
# Set up, and run the tests. Arguments go to pytest: -m slow, -m gpu, -m soak, a file, -k name.
# With --torch VERSION before them they run with that torch, in an environment of its own: --torch 2.15.0, --torch 2.12.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
if [ "${1:-}" = --torch ]; then
    enter_environment_with_torch "${2:-}"
    shift 2
fi
set_up requirements.txt requirements-dev.txt
exec env OMP_NUM_THREADS=1 python -m pytest "$@"
