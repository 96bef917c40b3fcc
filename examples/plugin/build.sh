#!/usr/bin/env bash
# Compile solarize.cc to libsolarize.so, in the folder given or here. Needs g++ 10 or newer.
#
#   examples/plugin/build.sh [FOLDER]
#
# BRISK_PYTHON=/path/to/python is the interpreter whose DALI it is for. DALI's headers include CUDA's: those of CUDA_HOME
# or /usr/local/cuda, else those in the packages that PyTorch brings.
set -euo pipefail
folder=$(realpath "${1:-$(dirname "${BASH_SOURCE[0]}")}")
cd "$(dirname "${BASH_SOURCE[0]}")"

read -r -d '' list_flags <<'PYTHON' || true
import importlib.util
import pathlib

from nvidia.dali import sysconfig

found = (importlib.util.find_spec(name) for name in ("nvidia", "triton"))
folders = [pathlib.Path(each) for spec in found if spec for each in spec.submodule_search_locations]
patterns = ("*/include", "*/include/cccl", "backends/nvidia/include")
headers = [path for pattern in patterns for folder in folders for path in sorted(folder.glob(pattern))]
print(*sysconfig.get_compile_flags(), *(f"-idirafter{path}" for path in headers), sep="\n")
print(*sysconfig.get_link_flags(), sep="\n")
PYTHON
mapfile -t flags < <("${BRISK_PYTHON:-python3}" -c "$list_flags")
cuda=${CUDA_HOME:-/usr/local/cuda}/include
"${CXX:-g++}" -std=c++20 -O2 -fPIC -shared "-isystem$cuda" solarize.cc -o "$folder/libsolarize.so" "${flags[@]}"
