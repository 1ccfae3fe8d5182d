#!/usr/bin/env bash
# Try everything on this device: bash scripts/gpu_suite.sh --device cuda --parts correctness, then --parts speed. Installs nothing from
# a network. Takes the active environment, else .venv, else python3. All flags are those of scripts/gpu_suite.py, which --help lists.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
    python=python
elif [ -x .venv/bin/python ]; then
    python=.venv/bin/python
else
    python=$(command -v python3 || command -v python) || { echo "error: no python3 was found; install Python 3.10 or newer" >&2; exit 1; }
fi
exec "$python" scripts/gpu_suite.py "$@"
