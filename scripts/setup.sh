# shellcheck shell=bash
# Set up the environment: bash scripts/setup.sh
#
# ./paddock and the other scripts source this: set_up puts a Python with the
# packages of the given requirements files on the PATH. It is the active
# environment if that has torch, else .venv here, which is made if necessary.
# A torch that is there is kept. Without an NVIDIA driver the CPU build is
# installed where there is one.
# PADDOCK_UV=1 uses uv instead of venv and pip, as does an environment that uv
# made, which has no pip.

if [ "${BASH_SOURCE[0]}" = "$0" ]; then cd "$(dirname "$0")/.."; fi
export PADDOCK_CALLED_FROM="${PADDOCK_CALLED_FROM:-${OLDPWD:-$PWD}}"  # before the cd that precedes this

set_up() {
    trap 'echo "Interrupted; the same command tries again" >&2; exit 130' INT  # pip catches Ctrl-C
    find_environment || make_environment .venv
    local prefix file stamp wanted stamps=() missing=()
    prefix=$(python -c 'import sys; print(sys.prefix)')
    for file in "$@"; do
        stamp=$prefix/.paddock-$(requirements "$file" | grep -v '^torch==' | cksum | tr -d ' ')
        [ -e "$stamp" ] || { missing+=("$file"); stamps+=("$stamp"); }
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    echo "Installing ${missing[*]} into $prefix (once, a minute or two) ..."
    wanted=$(requirements "${missing[@]}")
    if [[ $wanted == *torch==* ]]; then
        has_torch python || install_torch "$(sed -n 's/^torch==//p' <<< "$wanted")"
        # No requirement may replace it.
        wanted=$(grep -v '^torch==' <<< "$wanted")$'\n'torch==$(python -c 'from importlib.metadata import version; print(version("torch"))')
    fi
    install -r /dev/stdin <<< "$wanted" || { echo "error: ${missing[*]} could not be installed; the same command tries again" >&2; exit 1; }
    touch "${stamps[@]}" 2> /dev/null || true  # another user's environment is checked each time
}

# --help prints the comment at the head of the script that sources this, --version the version.
for argument in "$@"; do
    case "$argument" in
        -h | --help) sed -n '/^#!/d; /^[^#]/q; s/^# \{0,1\}//p' "scripts/${0##*/}"; exit ;;
        --version) sed -n 's/^__version__ = "\(.*\)"/Paddock \1/p' common/__init__.py; exit ;;
    esac
done

requirements() {
    sed 's/ *#.*//; /^ *$/d' "$@"
}

has_torch() {
    "$1" -c 'from importlib.metadata import version; version("torch")' 2> /dev/null
}

# Whether a Python belongs to an environment, into which packages may be installed.
in_environment() {
    [ -n "${CONDA_PREFIX:-}" ] || "$1" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' 2> /dev/null
}

# Put the Python of an existing environment on the PATH: one that has torch and is active or on the PATH, or .venv.
find_environment() {
    { has_torch python && in_environment python; } || activate .venv
}

activate() {
    [ -x "$1/bin/python" ] && [ -e "$1/bin/activate" ] || return 1  # venv writes activate last
    # shellcheck disable=SC1091
    source "$1/bin/activate"
}

# The first Python on the PATH that is new enough; one that has torch is preferred.
find_python() {
    local python found=""
    for python in python3 python python3.13 python3.12 python3.11 python3.10; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null || continue
        has_torch "$python" && found=$python && break
        found=${found:-$python}
    done
    echo "$found"
}

# Make an environment in a folder and activate it. It sees the torch of the machine's Python, if that has one.
make_environment() {
    local python options=()
    python=$(find_python)
    echo "Creating the environment $1 (once) ..."
    if has_torch "${python:-false}"; then options=(--system-site-packages); fi
    if [ -n "${PADDOCK_UV:-}" ]; then  # uv downloads Python too where it is missing or too old
        uv venv --quiet --allow-existing --python "${python:->=3.10}" ${options[@]+"${options[@]}"} "$1" \
            || { echo "error: uv could not make $1; install uv, or unset PADDOCK_UV" >&2; exit 1; }
    else
        [ -n "$python" ] || { echo "error: Paddock needs Python 3.10 or newer, and none is on the PATH; install it, or install uv and set PADDOCK_UV=1" >&2; exit 1; }
        "$python" -m venv ${options[@]+"${options[@]}"} "$1" \
            || { echo "error: $python could not make the environment $PWD/$1; the folder must be writable, and $python needs venv and ensurepip (in Debian and Ubuntu: apt install python3-venv), or install uv and set PADDOCK_UV=1" >&2; exit 1; }
    fi
    activate "$1"
}

install() {
    local quiet=(--quiet)
    [ ! -t 1 ] || quiet=()  # a terminal shows the progress
    if [ -n "${PADDOCK_UV:-}" ] || ! python -c 'import pip' 2> /dev/null; then
        uv pip install ${quiet[@]+"${quiet[@]}"} --python "$(command -v python)" "$@"
    else
        python -m pip install ${quiet[@]+"${quiet[@]}"} --disable-pip-version-check "$@"
    fi
}

# Install a version of torch (2.13.0, or 2.12.* for its newest); the CPU build where no GPU can be used.
install_torch() {
    local errors
    if [ "$(uname)" = Linux ] && ! command -v nvidia-smi > /dev/null && [ ! -e /proc/driver/nvidia ]; then
        echo "There is no NVIDIA driver, so the CPU build of torch $1 is preferred (200 MB) ..."
        if command -v uv > /dev/null && uv pip install --python "$(command -v python)" --torch-backend=cpu "torch==$1"; then return; fi
        if [[ $1 != *\* ]]; then
            { errors=$(install "torch==$1+cpu" 2>&1 1>&3) && return; } 3>&1
            # Only if the index answers and lacks this build; without a network or disk space, the larger one fails too.
            [[ $errors == *"from versions: "[0-9]* || $errors == *"no version of torch"* ]] \
                || { echo "$errors"$'\n'"error: torch $1 could not be installed; the same command tries again" >&2; exit 1; }
        fi
        echo "pip's index may have no CPU build. A build with CUDA is 3.4 GB to download and 5.3 GB on the disk."
        command -v uv > /dev/null || echo "To avoid that, stop here (Ctrl-C), install uv (pip install uv), and start again."
    fi
    install "torch==$1" || { echo "error: torch $1 could not be installed; the same command tries again" >&2; exit 1; }
}

# A separate environment with a version of torch; 2.12 means the newest 2.12.x.
enter_environment_with_torch() {
    [[ "$1" =~ ^[0-9]+\.[0-9]+(\.[0-9]+)?$ ]] || { echo "error: --torch ${1:-(nothing)}: expected a version such as 2.15.0, or 2.12 for the newest 2.12.x" >&2; exit 2; }
    activate ".venv-torch-$1" || make_environment ".venv-torch-$1"
    has_torch python || case "$1" in *.*.*) install_torch "$1" ;; *) install_torch "$1.*" ;; esac
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    rm -f "${VIRTUAL_ENV:-${CONDA_PREFIX:-.venv}}"/.paddock-*  # somebody may have removed a package since
    set_up requirements.txt
    echo "The environment is ready: $(python -c 'import sys; print(sys.executable)')"
fi
