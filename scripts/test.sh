#!/usr/bin/env bash
# Runs the tests that need no GPU, no Slurm and no network namespaces, without the long ones. Arguments go to pytest:
#
#   scripts/test.sh tests/test_models.py -x
#   scripts/test.sh -m slow                   # the last -m counts
#   scripts/test.sh -m gpu                    # or slurm, or network
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

use_environment requirements-dev.txt
# Tests often wait for processes, so three run at once on two cores, 8 at most.
tests=$((($(nproc) * 3 + 1) / 2))
exec "$PYTHON" -m pytest -m "not gpu and not slow and not slurm and not network" -n "$((tests < 8 ? tests : 8))" \
    --dist worksteal "$@"
