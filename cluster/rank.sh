#!/bin/bash
# One rank: rank.sh ENDS CACHE WORDS... Its caches are its own, and a bad end is recorded with the time: the first one is the cause.
# Without a CACHE ('') it touches no disk: the pre-flight must also start where that disk is what is bad.
ends=$1 cache=$2 node=${SLURMD_NODENAME:-$(hostname)}
shift 2
end() {
    [ "$1" -eq 0 ] || printf '{"time": %s, "rank": %s, "node": "%s", "code": %s}\n' "$(date +%s.%N)" "$SLURM_PROCID" "$node" "$1" >"$ends/$SLURM_PROCID"
    exit "$1"
}
trap : USR2 TERM # they reach this shell as well as the rank, which answers them
echo "--- start $((${SLURM_RESTART_COUNT:-0} + 1)): rank $SLURM_PROCID on $node, $(date -Is)"
if [ -n "$cache" ]; then
    (umask 077 && mkdir -p "$cache") || { echo "no place for compiled kernels on $node; set NODE_SCRATCH" >&2; end 1; }
    if [ ! -O "$cache" ] || [ -h "$cache" ] || [ ! -w "$cache" ]; then
        echo "$cache on $node is no directory of ours that can be written; set NODE_SCRATCH" >&2
        end 1
    fi
fi
"$@"
end $?
