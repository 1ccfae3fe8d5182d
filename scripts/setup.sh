# shellcheck shell=bash
# Set up the environment: bash scripts/setup.sh
#
# ./paddock and the other scripts source this file. set_up installs the packages
# of the given requirements files and puts their Python on the PATH: the active
# environment if it has torch, else .venv, which is created if necessary.
# An installed torch is kept. Without an NVIDIA driver, the CPU build of torch
# is preferred. PADDOCK_UV=1 uses uv instead of venv and pip; so does an
# environment without pip, such as one that uv created. FILE:NAME,... means only
# these packages of a requirements file. Packages whose installation was
# interrupted are found by their lists of files, and installed again.

TORCH=2.13.0  # is installed where there is none
if [ "${BASH_SOURCE[0]}" = "$0" ]; then cd "$(dirname "$0")/.."; fi

set_up() {
    when_interrupted="Interrupted. Run the same command to try again."
    find_environment || make_environment .venv
    local prefix file stamp wanted torch names stamps=() missing=()
    { prefix=$(python -c 'import sys; print(sys.prefix)'); } 2> /dev/null
    { exec 9>> "$prefix/.lock-of-set-up"; } 2> /dev/null || true  # may fail in another user's environment
    run python scripts/environment.py --repair "${@%%:*}" \
        || { echo "error: could not repair $prefix; delete it, and run the same command again" >&2; exit 1; }
    for file in "$@"; do
        stamp=$prefix/.paddock-$(requirements "$file" | grep -v '^torch[<>=]' | cksum | tr -d ' ')
        [ -e "$stamp" ] || { missing+=("$file"); stamps+=("$stamp"); }
    done
    [ ${#missing[@]} -gt 0 ] || { exec 9>&-; return 0; }  # the lock ends here
    names="${missing[*]#*:}" names=${names//,/, }
    if uses_uv && ! command -v uv > /dev/null; then
        echo "error: $names must be installed with uv, because PADDOCK_UV is set or $prefix has no pip, but uv is not on the PATH; put it there, and run the same command again" >&2
        exit 1
    fi
    echo "Installing $names into $prefix (only once, takes a minute or two) ..."
    wanted=$(for file in "${missing[@]}"; do requirements "$file"; done)
    if grep -q '^torch[<>=]' <<< "$wanted"; then
        has_torch python || install_torch "$TORCH"
        # Pin the installed torch, so that no requirement replaces it.
        { torch=$(python -c 'from importlib.metadata import version; print(version("torch"))'); } 2> /dev/null
        wanted=$(grep -v '^torch[<>=]' <<< "$wanted")$'\n'torch==$torch
        echo "Installing the other packages ..."
    fi
    install -r /dev/stdin <<< "$wanted" || { echo "error: failed to install $names; run the same command to try again" >&2; exit 1; }
    touch "${stamps[@]}" 2> /dev/null || true  # may fail in another user's environment
    exec 9>&-
}

# End with one line, and with the processes that `run` started.
interrupted() {
    trap '' INT TERM
    [ -z "$child" ] || kill -- "-$child" 2> /dev/null || true
    rm -rf "$scratch"
    if [ -t 8 ]; then echo >&8; fi  # below "^C"
    echo "$when_interrupted" >&8
    exit "$1"
}
when_interrupted=Stopped. child="" scratch=""
exec 8>&2  # a signal may come where errors are hidden
trap 'interrupted 130' INT
trap 'interrupted 143' TERM

# Run a command as a group of processes, which a signal does not reach by itself, but only through `interrupted`:
# several would print tracebacks, and temporary files would stay.
run() {
    local code=0
    scratch=$(mktemp -d)
    set -m
    TMPDIR=$scratch PADDOCK_PID=$$ "$@" &  # Paddock's commands leave the line to this one
    child=$!
    set +m
    wait "$child" || code=$?
    child=""
    rm -rf "$scratch"
    return "$code"
}

# --help prints the comment at the top of the script that sources this file.
for argument in "$@"; do
    case "$argument" in
        -h | --help) sed -n '/^#!/d; /^[^#]/q; s/^# \{0,1\}//p' "scripts/${0##*/}"; exit ;;
        --version) sed -n 's/^__version__ = "\(.*\)"/Paddock \1/p' common/__init__.py; exit ;;
    esac
done

# Print the requirements in a file, or with FILE:NAME,... those of them.
requirements() {
    local names=""
    [[ $1 != *:* ]] || names=${1#*:}
    sed 's/ *#.*//; /^ *$/d' "${1%%:*}" | grep -E "^(${names//,/|})" || true
}

has_torch() {
    { "$1" -c 'from importlib.metadata import version; version("torch")'; } 2> /dev/null
}

# Succeeds if a Python belongs to an environment, where packages may be installed.
in_environment() {
    [ -n "${CONDA_PREFIX:-}" ] || { "$1" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; } 2> /dev/null
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
        { "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; } 2> /dev/null || continue
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
        run uv venv --quiet --allow-existing --python "${python:->=3.10}" ${options[@]+"${options[@]}"} "$1" \
            || { echo "error: uv could not create $1; install uv, or unset PADDOCK_UV" >&2; exit 1; }
    else
        [ -n "$python" ] || { echo "error: Paddock needs Python 3.10 or newer on the PATH; install it, or install uv and set PADDOCK_UV=1" >&2; exit 1; }
        run "$python" -m venv ${options[@]+"${options[@]}"} "$1" \
            || { echo "error: $python could not create the environment $PWD/$1; the folder must be writable, and $python needs venv and ensurepip (in Debian and Ubuntu: apt install python3-venv), or install uv and set PADDOCK_UV=1" >&2; exit 1; }
    fi
    activate "$1"
}

# Succeeds if packages are installed with uv: if the user asks for it, or the environment has no pip.
uses_uv() {
    [ -n "${PADDOCK_UV:-}" ] || ! { python -c 'import pip'; } 2> /dev/null
}

install() {
    local quiet=(--quiet)
    [ ! -t 1 ] || quiet=()  # show progress in a terminal
    if uses_uv; then
        run uv pip install ${quiet[@]+"${quiet[@]}"} --python "$(command -v python)" "$@"
    else
        # Without questions, which a background process cannot ask.
        run python -m pip install ${quiet[@]+"${quiet[@]}"} --no-input --disable-pip-version-check "$@"
    fi
}

# Install a version of torch (2.13.0, or 2.12.* for the newest 2.12.x). Without a GPU, prefer the CPU build.
install_torch() {
    local errors log
    if [ "$(uname)" = Linux ] && ! command -v nvidia-smi > /dev/null && [ ! -e /proc/driver/nvidia ]; then
        echo "Found no NVIDIA driver: installing the CPU build of torch $1 (200 MB) ..."
        if command -v uv > /dev/null; then
            if run uv pip install --python "$(command -v python)" --torch-backend=cpu "torch==$1"; then return; fi
            echo "uv found no CPU build there; trying the usual index ..."
        fi
        if [[ $1 != *\* ]]; then
            log=$(mktemp)
            if install "torch==$1+cpu" 2> "$log"; then rm "$log"; return; fi
            errors=$(cat "$log"; rm "$log")
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
    python scripts/environment.py --whole --imports requirements.txt \
        || { echo "To start over, delete ${VIRTUAL_ENV:-the environment}, and run the same command again." >&2; exit 1; }
    echo "The environment is ready: $(python -c 'import sys; print(sys.executable)')"
fi
