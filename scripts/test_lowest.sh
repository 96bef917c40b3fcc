#!/usr/bin/env bash
# Runs the tests of scripts/test.sh with the lowest versions that requirements.txt allows, in another environment,
# .venv-lowest (7 GB). The first time needs some minutes more. Arguments go to pytest:
#
#   scripts/test_lowest.sh tests/test_models.py -x
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

lowest=constraints-lowest.txt
diff <(sed -n 's/^\([a-z0-9-]*\)>=\([0-9.]*\).*/\1==\2/p' requirements.txt) <(sed '/^#/d' "$lowest") >&2 ||
    die "$lowest does not hold the lowest versions of requirements.txt; the lines above differ"
command -v python3.11 >/dev/null || die "found no python3.11, for which $lowest is made"

python=$PWD/.venv-lowest/bin/python
stamp=.venv-lowest/.installed
expected=$(cat requirements*.txt "$lowest" | sha256sum)
if [[ ! -f $stamp || $(<"$stamp") != "$expected" ]]; then
    echo "installing the lowest versions into .venv-lowest"
    python3.11 -m venv --clear .venv-lowest
    # What the tests need on top is the newest that fits: constraints.txt would take newer ones of the lowest, too.
    "$python" -m pip install --quiet --no-input --disable-pip-version-check -r requirements-dev.txt -c "$lowest"
    echo "$expected" >"$stamp"
fi
# Old packages use what the newest of those that they need deprecate. Only the locked versions must do without warnings.
BRISK_PYTHON=$python exec scripts/test.sh -W ignore "$@"
