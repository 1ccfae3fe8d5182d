#!/usr/bin/env bash
# Set up and run the tests.
#
# ./paddock test is the same.
#
#   bash scripts/test.sh                            those that are not marked
#   bash scripts/test.sh -m slow                    or -m gpu, or -m soak
#   bash scripts/test.sh tests/test_model.py -x
#   bash scripts/test.sh --torch 2.12               with another torch
#
# --torch VERSION (2.15.0, or 2.12 for its newest) must come first and makes a
# separate environment. All other flags go to pytest, which runs the files in
# three processes (-n 0 for one process, which --pdb needs).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
if [ "${1:-}" = --torch ]; then
    enter_environment_with_torch "${2:-}"
    shift 2
fi
set_up requirements.txt requirements-extras.txt requirements-dev.txt
exec env OMP_NUM_THREADS=1 python -m pytest -n 3 --dist loadfile "$@"
