# Set up the environment: bash scripts/setup.sh
#
# Sourced by the other scripts: set_up puts a Python with the packages of the
# given requirements files on the PATH. It uses an active environment that has
# torch, and keeps that torch; otherwise it creates .venv here.
# PADDOCK_UV=1 uses uv instead of venv and pip, as does an environment that uv
# made, which has no pip.

if [ "${BASH_SOURCE[0]}" = "$0" ]; then cd "$(dirname "$0")/.."; fi
export PADDOCK_CALLED_FROM="${PADDOCK_CALLED_FROM:-${OLDPWD:-$PWD}}"  # before the cd that precedes this

set_up() {
    [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && has_torch || enter_environment .venv
    local wanted stamp
    wanted=$(cat "$@" | sed 's/#.*//' | grep -v '^\s*$')
    stamp="$(python -c 'import sys; print(sys.prefix)')/.paddock-$(echo "$wanted" | grep -v '^torch==' | cksum | tr -d ' ')"
    if [ ! -e "$stamp" ]; then
        if has_torch; then  # no requirement may replace it
            wanted=$(echo "$wanted" | sed "s/^torch==.*/torch==$(python -c 'from importlib.metadata import version; print(version("torch"))')/")
        fi
        echo "Installing $* (once, about a minute and a half) ..."
        echo "$wanted" > "$stamp.txt"
        install -r "$stamp.txt" || { echo "error: $* could not be installed" >&2; exit 1; }
        rm -f "$stamp.txt"
        touch "$stamp"
    fi
}

# --help prints the comment at the head of the script that sources this, --version the version.
for argument in "$@"; do
    case "$argument" in
        -h | --help) sed -n '/^#!/d; /^[^#]/q; s/^# \{0,1\}//p' "scripts/${0##*/}"; exit ;;
        --version) sed -n 's/^__version__ = "\(.*\)"/Paddock \1/p' common/__init__.py; exit ;;
    esac
done

has_torch() {
    python -c 'import torch' 2>/dev/null
}

install() {
    if [ -n "${PADDOCK_UV:-}" ] || ! python -c 'import pip' 2>/dev/null; then
        uv pip install --quiet --python "$(command -v python)" "$@"
    else
        python -m pip install --quiet --disable-pip-version-check "$@"
    fi
}

make_environment() {
    if [ -n "${PADDOCK_UV:-}" ]; then  # uv downloads Python too where it is missing or too old
        uv venv --quiet --python '>=3.10' "$1" || { echo "error: uv could not make $1; install uv, or unset PADDOCK_UV" >&2; exit 1; }
        return
    fi
    local python
    python=$(command -v python3 || command -v python) || { echo "error: no python3 was found; install Python 3.10 or newer" >&2; exit 1; }
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: $("$python" --version) is too old; Paddock needs 3.10" >&2; exit 1; }
    "$python" -m venv "$1"
}

# Activate the environment in a folder; create it if it does not exist.
enter_environment() {
    if [ ! -x "$1/bin/python" ]; then
        echo "Creating the environment $1 (once) ..."
        make_environment "$1"
    fi
    # shellcheck disable=SC1091
    source "$1/bin/activate"
}

# A separate environment with a version of torch, the CPU build if there is one; 2.12 means the newest 2.12.x.
enter_environment_with_torch() {
    [[ "$1" =~ ^[0-9]+\.[0-9]+(\.[0-9]+)?$ ]] || { echo "error: --torch ${1:-(nothing)}: expected a version such as 2.15.0, or 2.12 for the newest 2.12.x" >&2; exit 2; }
    enter_environment ".venv-torch-$1"
    if ! has_torch; then
        echo "Installing torch $1 (once; several GB if there is no CPU build) ..."
        { [[ "$1" = *.*.* ]] && install "torch==$1+cpu" 2>/dev/null; } || install "torch==$1.*" || { echo "error: torch $1 could not be installed" >&2; exit 1; }
    fi
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    rm -f "${VIRTUAL_ENV:-${CONDA_PREFIX:-.venv}}"/.paddock-*  # somebody may have removed a package since
    set_up requirements.txt
    echo "The environment is ready: $(python -c 'import sys; print(sys.executable)')"
fi
