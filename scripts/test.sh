#!/usr/bin/env bash
# Set up and run the tests. Arguments go to pytest: -m slow, -m gpu, -m soak, a file, -k name.
# A first argument --torch VERSION (2.15.0, or 2.12) runs them with that torch, in a separate environment.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
if [ "${1:-}" = --torch ]; then
    enter_environment_with_torch "${2:-}"
    shift 2
fi
set_up requirements.txt requirements-dev.txt
exec env OMP_NUM_THREADS=1 python -m pytest "$@"
