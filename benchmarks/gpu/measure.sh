#!/usr/bin/env bash
# Figures from a GPU that stands elsewhere: benchmarks/gpu.py, a group of its parts a call, each under ten minutes.
#
#   bash benchmarks/gpu/measure.sh step      ceilings, the pieces of a step against what they could be, profiles of whole steps
#   bash benchmarks/gpu/measure.sh data      the data path, real runs from shards, what ranks cost
#   bash benchmarks/gpu/measure.sh peers     others beside us: models.py, train.py, loader.py, transfer_*.py, efficiency; then parity
#
# NAMES="profile-* pieces" takes some parts only; SMALL=1: a dry run. found.json, verdicts.txt and logs.tgz come back in $OUT;
# `benchmarks/gpu.py --table found.json ...` makes the table of what several calls have found.
set -u
# shellcheck source=benchmarks/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
GROUP=${1:-step}
LOGS=$LOGS-$GROUP
setup
# shellcheck disable=SC2086
"$PYTHON" benchmarks/gpu.py --only "$GROUP" --budget-s $(($(left) - 10)) --slow "${SLOW:-1}" --out "$OUT/found.json" --logs "$LOGS" \
    ${NAMES:+--names "$NAMES"} ${SMALL:+--quick}
summary
