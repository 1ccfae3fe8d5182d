# shellcheck shell=bash
# Set up the environment: bash scripts/setup.sh
#
# ./paddock and the other scripts source this file. set_up installs the packages
# of the given requirements files and puts their Python on the PATH: the active
# environment if it has torch, else .venv, which is created if necessary.
# An installed torch is kept. Without an NVIDIA driver, the CPU build of torch
# is preferred. PADDOCK_UV=1 uses uv instead of venv and pip; so does an
# environment without pip, such as one that uv created.

if [ "${BASH_SOURCE[0]}" = "$0" ]; then cd "$(dirname "$0")/.."; fi
export PADDOCK_CALLED_FROM="${PADDOCK_CALLED_FROM:-${OLDPWD:-$PWD}}"  # before the cd that precedes this

set_up() {
    trap 'echo "Interrupted. Run the same command to try again." >&2; exit 130' INT  # pip catches Ctrl-C
    find_environment || make_environment .venv
    local prefix file stamp wanted stamps=() missing=()
    prefix=$(python -c 'import sys; print(sys.prefix)')
    for file in "$@"; do
        stamp=$prefix/.paddock-$(requirements "$file" | grep -v '^torch==' | cksum | tr -d ' ')
        [ -e "$stamp" ] || { missing+=("$file"); stamps+=("$stamp"); }
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    echo "Installing ${missing[*]} into $prefix (only once, takes a minute or two) ..."
    wanted=$(requirements "${missing[@]}")
    if [[ $wanted == *torch==* ]]; then
        has_torch python || install_torch "$(sed -n 's/^torch==//p' <<< "$wanted")"
        # Pin the installed torch, so that no requirement replaces it.
        wanted=$(grep -v '^torch==' <<< "$wanted")$'\n'torch==$(python -c 'from importlib.metadata import version; print(version("torch"))')
    fi
    install -r /dev/stdin <<< "$wanted" || { echo "error: failed to install ${missing[*]}; run the same command to try again" >&2; exit 1; }
    touch "${stamps[@]}" 2> /dev/null || true  # may fail in another user's environment
}

# --help prints the comment at the top of the script that sources this file.
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

# Succeeds if a Python belongs to an environment, where packages may be installed.
in_environment() {
    [ -n "${CONDA_PREFIX:-}" ] || "$1" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' 2> /dev/null
}

# Use the Python on the PATH if it has torch and belongs to an environment, else activate .venv.
find_environment() {
    { has_torch python && in_environment python; } || activate .venv
}

activate() {
    [ -x "$1/bin/python" ] && [ -e "$1/bin/activate" ] || return 1  # venv writes activate last
    # shellcheck disable=SC1091
    source "$1/bin/activate"
}

# Print the first Python on the PATH that is new enough, preferably one with torch.
find_python() {
    local python found=""
    for python in python3 python python3.13 python3.12 python3.11 python3.10; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null || continue
        has_torch "$python" && found=$python && break
        found=${found:-$python}
    done
    echo "$found"
}

# Create an environment in a folder and activate it. It inherits torch from the machine's Python if installed there.
make_environment() {
    local python options=()
    python=$(find_python)
    echo "Creating the environment $1 (only once) ..."
    if has_torch "${python:-false}"; then options=(--system-site-packages); fi
    if [ -n "${PADDOCK_UV:-}" ]; then  # uv also downloads Python if it is missing or too old
        uv venv --quiet --allow-existing --python "${python:->=3.10}" ${options[@]+"${options[@]}"} "$1" \
            || { echo "error: uv could not create $1; install uv, or unset PADDOCK_UV" >&2; exit 1; }
    else
        [ -n "$python" ] || { echo "error: Paddock needs Python 3.10 or newer on the PATH; install it, or install uv and set PADDOCK_UV=1" >&2; exit 1; }
        "$python" -m venv ${options[@]+"${options[@]}"} "$1" \
            || { echo "error: $python could not create the environment $PWD/$1; the folder must be writable, and $python needs venv and ensurepip (in Debian and Ubuntu: apt install python3-venv), or install uv and set PADDOCK_UV=1" >&2; exit 1; }
    fi
    activate "$1"
}

install() {
    local quiet=(--quiet)
    [ ! -t 1 ] || quiet=()  # show progress in a terminal
    if [ -n "${PADDOCK_UV:-}" ] || ! python -c 'import pip' 2> /dev/null; then
        uv pip install ${quiet[@]+"${quiet[@]}"} --python "$(command -v python)" "$@"
    else
        python -m pip install ${quiet[@]+"${quiet[@]}"} --disable-pip-version-check "$@"
    fi
}

# Install a version of torch (2.13.0, or 2.12.* for the newest 2.12.x). Without a GPU, prefer the CPU build.
install_torch() {
    local errors
    if [ "$(uname)" = Linux ] && ! command -v nvidia-smi > /dev/null && [ ! -e /proc/driver/nvidia ]; then
        echo "Found no NVIDIA driver: installing the CPU build of torch $1 (200 MB) ..."
        if command -v uv > /dev/null && uv pip install --python "$(command -v python)" --torch-backend=cpu "torch==$1"; then return; fi
        if [[ $1 != *\* ]]; then
            { errors=$(install "torch==$1+cpu" 2>&1 1>&3) && return; } 3>&1
            # Continue only if the index has no such build: otherwise (no network, disk full) the larger one fails too.
            [[ $errors == *"from versions: "[0-9]* || $errors == *"no version of torch"* ]] \
                || { echo "$errors"$'\n'"error: failed to install torch $1; run the same command to try again" >&2; exit 1; }
        fi
        echo "Found no CPU build in pip's index. The CUDA build is 3.4 GB to download, 5.3 GB on disk."
        command -v uv > /dev/null || echo "To avoid that, press Ctrl-C, install uv (pip install uv), and run the command again."
    fi
    install "torch==$1" || { echo "error: failed to install torch $1; run the same command to try again" >&2; exit 1; }
}

# Enter a separate environment with a version of torch; 2.12 means the newest 2.12.x.
enter_environment_with_torch() {
    [[ "$1" =~ ^[0-9]+\.[0-9]+(\.[0-9]+)?$ ]] || { echo "error: --torch ${1:-(nothing)}: expected a version such as 2.15.0, or 2.12 for the newest 2.12.x" >&2; exit 2; }
    activate ".venv-torch-$1" || make_environment ".venv-torch-$1"
    has_torch python || case "$1" in *.*.*) install_torch "$1" ;; *) install_torch "$1.*" ;; esac
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    rm -f "${VIRTUAL_ENV:-${CONDA_PREFIX:-.venv}}"/.paddock-*  # a package may have been removed since
    set_up requirements.txt
    echo "The environment is ready: $(python -c 'import sys; print(sys.executable)')"
fi
