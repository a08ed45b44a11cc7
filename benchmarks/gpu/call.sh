#!/usr/bin/env bash
# Run one call on a borrowed GPU machine: install the wheels of .gpu/, copy the project to GPU_WORK (with results of earlier calls), and run
#
#   bash benchmarks/gpu/call.sh tests [PYTEST OPTIONS]            pytest -m cuda
#   bash benchmarks/gpu/call.sh step|data|peers [gpu.py OPTIONS]  benchmarks/gpu.py --only GROUP
#
# Environment: PYTHON (default: python3), OUT (directory of results), GPU_WORK (working directory), BUDGET_S (seconds for the call, default: 570).
set -eu
CARRIED=$PWD/.gpu
PYTHON=${PYTHON:-python3} OUT=${OUT:-$CARRIED/out} WORK=${GPU_WORK:-${TMPDIR:-/tmp}/gpu-work} BUDGET_S=${BUDGET_S:-570}
what=$1; shift
mkdir -p "$OUT" "$WORK/project"
if [ -d "$CARRIED/wheels" ] && [ ! -d "$WORK/site" ]; then
    "$PYTHON" -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
        --target "$WORK/site.part" "$CARRIED"/wheels/*.whl
    mv "$WORK/site.part" "$WORK/site"
    echo "installed the wheels in $SECONDS s"
fi
tar --exclude=./.gpu --exclude=./.git --exclude=./.venv --exclude=./data --exclude=./runs --exclude=./build --exclude='./benchmarks/.*' \
    --exclude=__pycache__ -cf - . | tar -C "$WORK/project" -xf -
cd "$WORK/project"
export PYTHONPATH=$WORK/site:$WORK/project PYTHONUNBUFFERED=1 MLFLOW_DISABLE_TELEMETRY=true DO_NOT_TRACK=true
export TORCHINDUCTOR_CACHE_DIR=$WORK/inductor TRITON_CACHE_DIR=$WORK/triton NUMBA_CACHE_DIR=$WORK/numba
COMMIT=$(cat "$CARRIED/commit.txt"); export COMMIT  # the copy has no git directory
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm --format=csv,noheader || echo "no nvidia-smi"
if [ "$what" = tests ]; then
    set -- "$PYTHON" -m pytest -q -m cuda tests/test_cuda.py -o "junit_family=xunit2" --junitxml "$OUT/tests.xml" "$@"
else
    set -- "$PYTHON" benchmarks/gpu.py --only "$what" --budget-s $((BUDGET_S - SECONDS - 10)) --out "$OUT/found.json" "$@"
fi
timeout $((BUDGET_S - SECONDS)) "$@"
