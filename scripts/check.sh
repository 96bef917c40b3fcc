#!/usr/bin/env bash
# Checks format, lint and types, with the versions of ruff and mypy that constraints.txt pins.
#
#   scripts/check.sh          # only check
#   scripts/check.sh --fix    # format and repair what ruff can, then check
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

[[ $# -eq 0 || $* == --fix ]] || die "unknown argument '$*'; the only one is --fix"

# Another version formats and checks differently, so a wrong one is replaced.
require_pinned() {
    local tool=$1 pinned found
    pinned=$(sed -n "s/^$tool==//p" constraints.txt)
    found=$("$PYTHON" -c "from importlib.metadata import version; print(version('$tool'))" 2>/dev/null || echo none)
    [[ $found != "$pinned" ]] || return 0
    [[ -z ${BRISK_PYTHON:-} ]] || die "$tool is $found, needs $pinned: $PYTHON -m pip install $tool==$pinned"
    "$PYTHON" -m pip install --quiet --no-input --disable-pip-version-check "$tool==$pinned" -c constraints.txt
}

use_environment requirements-dev.txt
require_pinned ruff
require_pinned mypy

if [[ ${1:-} == --fix ]]; then
    "$PYTHON" -m ruff check --fix --exit-zero --quiet
    "$PYTHON" -m ruff format
fi
"$PYTHON" -m ruff format --check
"$PYTHON" -m ruff check
"$PYTHON" -m mypy # strict, over the files that pyproject.toml lists
