#!/usr/bin/env bash
# Downloads the wheels that `benchmarks/gpu_check.py` may miss on a machine with torch and an older Transformers but
# without a package index: the versions of constraints/ci.txt, for Linux on x86-64.
#
#   benchmarks/gpu_wheels.sh [PYTHON_VERSION [FOLDER]]      PYTHON_VERSION of that machine; by default 3.12 and wheels
set -euo pipefail

version=${1:-3.12}
folder=${2:-wheels}
constraints=$(dirname "$0")/../constraints/ci.txt

# This library's own, then Transformers and what it wants in versions that an older one does not.
names=(
    diskcache xxhash blake3 click tqdm
    transformers tokenizers safetensors regex accelerate psutil
    huggingface_hub hf-xet filelock fsspec httpx2 httpcore2 h11 truststore anyio idna typing_extensions
)

pins=()
for name in "${names[@]}"; do
    pins+=("$(grep -iE "^$name==" "$constraints")") || { echo "$name is not in $constraints" >&2; exit 1; }
done

# pip matches the number of a platform exactly
platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
for glibc in 17 24 27 28 31 34; do
    platforms+=(--platform "manylinux_2_${glibc}_x86_64")
done

"${PYTHON:-python3}" -m pip download --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    "${platforms[@]}" --dest "$folder" "${pins[@]}"
