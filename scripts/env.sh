# shellcheck shell=bash
# Sourced by the other scripts. Changes to the repository root, defines die and use_environment.
#
# BRISK_PYTHON=PYTHON uses that interpreter with the packages it has: nothing is made or installed.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

die() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# Prints the first Python on the PATH that is new enough.
find_python() {
    local candidate
    for candidate in python3 python3.11 python3.12 python3.13 python3.14; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "found no Python 3.11 or newer; install one, or set BRISK_PYTHON to an interpreter that has the packages"
}

# use_environment REQUIREMENTS: sets PYTHON to an interpreter that has the packages of that file.
use_environment() {
    local requirements=$1 base expected stamp
    if [[ -n ${BRISK_PYTHON:-} ]]; then
        PYTHON=$(command -v "$BRISK_PYTHON") || die "BRISK_PYTHON=$BRISK_PYTHON is not an executable"
        return
    fi

    if [[ ! -x .venv/bin/python || ! -x .venv/bin/pip ]]; then
        base=$(find_python)
        echo "making .venv with $("$base" --version)"
        "$base" -m venv .venv
    fi
    PYTHON=$PWD/.venv/bin/python

    # pip needs seconds to find that nothing is missing; the stamp is immediate.
    expected=$(cat requirements*.txt constraints.txt | sha256sum)
    stamp=.venv/.installed-${requirements%.txt}
    if [[ -f $stamp && $(<"$stamp") == "$expected" ]]; then
        return
    fi
    echo "installing $requirements (the first time this takes minutes)"
    "$PYTHON" -m pip install --quiet --no-input --disable-pip-version-check -r "$requirements" -c constraints.txt
    echo "$expected" >"$stamp"
}
