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
# As many as there are cores, 8 at most: each more collects for half a minute of CPU, and the cores are busy anyway.
tests=$(nproc)
exec "$PYTHON" -m pytest -m "not gpu and not slow and not slurm and not network" -n "$((tests < 8 ? tests : 8))" \
    --dist worksteal "$@"
