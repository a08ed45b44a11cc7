# shellcheck shell=bash
# Sourced by first.sh and measure.sh on the GPU machine: installs the wheels, copies the project to where results of earlier calls of
# the same machine still lie, and runs commands with a time limit and a one-line verdict each. Nothing here ends on a failure.
#
# PYTHON (python3), OUT (what comes back), GPU_WORK (where all happens), BUDGET_S (of the whole call), JOBS (at a time),
# SLOW (limits are so many times as long: for a dry run on a busy CPU), LIST=1 (print the commands, run none).

KIT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3}
CARRIED=$PWD/.gpu
OUT=${OUT:-$CARRIED/out}
WORK=${GPU_WORK:-${TMPDIR:-/tmp}/gpu-work}
BUDGET_S=${BUDGET_S:-570}
JOBS=${JOBS:-1}
NAMES=${NAMES:-}
LOGS=$WORK/logs/$(basename "$0" .sh)

left() { echo $((BUDGET_S - SECONDS)); }

setup() {
    [ -z "${LIST:-}" ] || return 0
    mkdir -p "$OUT" "$WORK/site" "$WORK/project"
    rm -rf "$LOGS"; mkdir -p "$LOGS"
    : > "$LOGS/verdicts"
    local wheels; wheels=$(cd "$CARRIED/wheels" 2> /dev/null && ls ./*.whl)
    if [ -n "$wheels" ] && [ "$wheels" != "$(cat "$WORK/site/.wheels" 2> /dev/null)" ]; then
        "$PYTHON" -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir --upgrade \
            --target "$WORK/site" "$CARRIED"/wheels/*.whl > "$LOGS/install.log" 2>&1 && echo "$wheels" > "$WORK/site/.wheels"
        echo "installed $(echo "$wheels" | wc -l) wheels in $SECONDS s (exit $?)"
    fi
    tar -C "$KIT/../.." --exclude=./.gpu --exclude=./.git --exclude=./.venv --exclude=./data --exclude=./runs --exclude=./build --exclude='./benchmarks/.*' \
        --exclude=__pycache__ -cf - . | tar -C "$WORK/project" -xf -
    cd "$WORK/project" || exit 1
    export PYTHONPATH=$WORK/site:$WORK/project PYTHONUNBUFFERED=1 MLFLOW_DISABLE_TELEMETRY=true DO_NOT_TRACK=true
    export TORCHINDUCTOR_CACHE_DIR=$WORK/inductor TRITON_CACHE_DIR=$WORK/triton NUMBA_CACHE_DIR=$WORK/numba
    { echo "commit ${COMMIT:=$(cat "$CARRIED/commit.txt" 2> /dev/null || git -C "$KIT" describe --always --dirty --abbrev=12 2> /dev/null || echo unknown)}, $(nproc) cores, $(date -u +%FT%TZ)"
      nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used,clocks.sm,power.draw --format=csv,noheader 2> /dev/null || echo "no nvidia-smi"
      "$PYTHON" -c 'import platform, torch; print("python", platform.python_version(), "torch", torch.__version__, "cuda", torch.cuda.is_available())'
      free -g | sed -n 2p; df -h "$WORK" | tail -1; } > "$LOGS/machine" 2>&1
    cat "$LOGS/machine"
    export COMMIT  # of which there is no other trace: the copy is no checkout
}

wanted() { # NAME: is it among NAMES (globs), where any are given?
    [ -z "$NAMES" ] && return 0
    local each
    for each in $NAMES; do
        # shellcheck disable=SC2053
        [[ $1 == $each ]] && return 0
    done
    return 1
}

# try NAME LIMIT_S COMMAND...: in the background, at most JOBS at a time. Its output is in $LOGS/NAME.log; its verdict a line.
try() {
    local name=$1 limit=$(($2 * ${SLOW:-1})); shift 2
    wanted "$name" || return 0
    [ -z "${LIST:-}" ] || { printf '%s\037' "$name" "$@"; printf '\036'; return 0; }
    while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n; done
    [ "$limit" -le "$(left)" ] || limit=$(left)
    if [ "$limit" -lt 15 ]; then
        echo "none     $name: no time was left" >> "$LOGS/verdicts"
        return 0
    fi
    run_one "$name" "$limit" "$@" &
}

run_one() {
    local name=$1 limit=$2 began=$SECONDS code word last; shift 2
    timeout -k 10 "$limit" "$@" > "$LOGS/$name.log" 2>&1
    code=$?
    case $code in 0) word="ok      " ;; 124 | 137) word="TIMEOUT " ;; *) word="FAILED  " ;; esac
    last=$(grep -av '^[[:space:]]*$' "$LOGS/$name.log" | grep -av 'Warning\|warn(' | tail -1 | tr '\r' '\n' | tail -1 | cut -c1-150)
    echo "$word $name ($((SECONDS - began)) s, exit $code): $last" >> "$LOGS/verdicts"
    echo "$word $name ($((SECONDS - began)) s): $last"
}

settle() { wait; }

summary() { # what went well in a few lines; what failed comes last, for the reply holds the end of the output; everything goes into $OUT
    wait
    [ -z "${LIST:-}" ] || return 0
    { cat "$LOGS/machine"; sort "$LOGS/verdicts"; } > "$OUT/verdicts.txt"
    tar -C "$LOGS" -czf "$OUT/logs.tgz" . 2> /dev/null
    echo; echo "==== $(grep -c '^ok' "$LOGS/verdicts") ok: $(sed -n 's/^ok *\([^ ]*\) (\([0-9]*\) s.*/\1 \2s/p' "$LOGS/verdicts" | sort | paste -sd, | sed 's/,/, /g')"
    local name
    grep -v '^ok' "$LOGS/verdicts" | while read -r word name rest; do
        echo "---- $word $name $rest"
        grep -av '^[[:space:]]*$' "$LOGS/$name.log" 2> /dev/null | tail -12 | cut -c1-220
    done | head -c 7000
    echo "==== $(grep -vc '^ok' "$LOGS/verdicts") not ok; $SECONDS s of $BUDGET_S"
    ! grep -qv '^ok' "$LOGS/verdicts"
}
