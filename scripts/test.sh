#!/usr/bin/env bash
# Set up and run the tests.
#
#   bash scripts/test.sh                    unmarked tests; or ./paddock test
#   ./paddock test -m slow                  slow tests; also -m gpu, -m soak
#   ./paddock test tests/test_model.py -x
#   ./paddock test --torch 2.12             with another version of torch
#
# --torch VERSION (2.15.0, or 2.12 for the newest 2.12.x) must come first. It
# creates a separate environment. Other flags are passed to pytest, which runs
# the test files in three processes. Use -n 0 for one process (for --pdb).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
if [ "${1:-}" = --torch ]; then
    enter_environment_with_torch "${2:-}"
    shift 2
fi
set_up requirements.txt requirements-extras.txt requirements-dev.txt
# Compiled modules are kept, so that each process of the tests starts sooner.
exec env OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
