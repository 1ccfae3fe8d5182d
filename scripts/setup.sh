# Sourced by run.sh and test.sh: puts a Python with everything from the given requirements files on the PATH.
# An active environment that has torch is used as it is (its torch is left alone); otherwise .venv is made here.

set_up() {
    if ! { [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && python -c 'import torch' 2>/dev/null; }; then
        if [ ! -x .venv/bin/python ]; then
            echo "Making the environment .venv (once) ..."
            local python
            python=$(command -v python3 || command -v python) || { echo "error: no python3 was found; install Python 3.10 or newer" >&2; exit 1; }
            "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: $("$python" --version) is too old; Paddock needs 3.10" >&2; exit 1; }
            "$python" -m venv .venv
        fi
        # shellcheck disable=SC1091
        source .venv/bin/activate
    fi
    local wanted stamp
    wanted=$(cat "$@" | sed 's/#.*//' | grep -v '^\s*$')
    if python -c 'import torch' 2>/dev/null; then
        wanted=$(echo "$wanted" | grep -v '^torch==')
    fi
    stamp="$(python -c 'import sys; print(sys.prefix)')/.paddock-$(echo "$wanted" | grep -v '^torch==' | cksum | tr -d ' ')"
    if [ ! -e "$stamp" ]; then
        echo "Installing $* (once, about a minute and a half) ..."
        echo "$wanted" > "$stamp.txt"
        python -m pip install --quiet --disable-pip-version-check -r "$stamp.txt" || { echo "error: pip could not install $*" >&2; exit 1; }
        rm -f "$stamp.txt"
        touch "$stamp"
    fi
}
