#!/usr/bin/env bash
# Run the GPU suite; --help lists the flags.
# Downloads nothing. Uses the active environment if it has torch, else .venv, else python3.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.." 2> /dev/null || cd ..  # without other programs, since PATH may be empty
has_torch='import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'
active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
PATH=${PATH:+$PATH:}${active:+$active/bin}
if [ -n "$active" ] && python -c "$has_torch"; then
    python=python
elif [ -x .venv/bin/python ]; then
    python=.venv/bin/python
elif ! python=$(command -v python3 || command -v python); then
    echo "error: no python3 was found; install Python 3.10 or newer" >&2
    exit 1
fi
exec "$python" scripts/gpu/suite.py "$@"
