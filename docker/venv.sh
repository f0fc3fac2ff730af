#!/usr/bin/env bash
# Creates .venv with the exact packages of requirements.lock and agentft itself (editable).
# uv is used where it can be had (on PATH, else as a package inside .venv), otherwise pip.
# Run by `make setup`; does nothing that is not needed, so it may be run again at any time.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}

fail() { echo "setup: $*" >&2; exit 3; }

find_python() {
    if [ -z "$python" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "setup: no Python found; installing python3 and python3-venv with apt-get"
        apt-get update -qq && apt-get install -y -qq --no-install-recommends python3 python3-venv
        python=$(command -v python3.11 || command -v python3)
    fi
    [ -n "$python" ] || fail "Python 3.11 is needed; install it, or say PYTHON=/path/to/python3.11 make setup"
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
        || fail "Python 3.11 is needed, $python is $("$python" -V 2>&1); say PYTHON=/path/to/python3.11 make setup"
}

create_venv() {
    [ -x "$venv/bin/python" ] && return
    if command -v uv >/dev/null && uv --version >/dev/null 2>&1; then
        uv venv --quiet --python "$python" "$venv" && return
    fi
    if ! "$python" -c 'import ensurepip' 2>/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "setup: this Python has no venv module; installing python3-venv with apt-get"
        apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv
    fi
    "$python" -m venv "$venv" || fail "cannot create $venv; remove it and install python3-venv"
}

find_uv() {
    if command -v uv >/dev/null && uv --version >/dev/null 2>&1; then
        echo uv
    elif [ -x "$venv/bin/uv" ] || "$venv/bin/python" -m pip install --quiet uv >/dev/null 2>&1; then
        echo "$venv/bin/uv"
    fi
}

find_python
create_venv
uv=$(find_uv)
if [ -n "$uv" ]; then
    echo "setup: installing requirements.lock with uv"
    "$uv" pip install --quiet --python "$venv/bin/python" -r requirements.lock
    "$uv" pip install --quiet --python "$venv/bin/python" --no-deps -e .
else
    echo "setup: installing requirements.lock with pip (uv cannot be had)"
    "$venv/bin/python" -m pip install --quiet -r requirements.lock
    "$venv/bin/python" -m pip install --quiet --no-deps -e .
fi
touch "$venv/.installed"
echo "setup: $venv is ready ($("$venv/bin/agentft" --version))"
