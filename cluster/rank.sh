#!/bin/bash
# Run one rank: rank.sh ENDS CACHE WORDS... Each rank has its own caches. A bad end is recorded with the time: the first one is the cause.
# If CACHE is '', the script uses no disk, because the pre-flight must start even on a node with a bad disk.
ends=$1 cache=$2 node=${SLURMD_NODENAME:-$(hostname)}
shift 2
end() {
    [ "$1" -eq 0 ] || printf '{"time": %s, "rank": %s, "node": "%s", "code": %s}\n' "$(date +%s.%N)" "$SLURM_PROCID" "$node" "$1" >"$ends/$SLURM_PROCID"
    exit "$1"
}
trap : USR2 TERM # they reach this shell and the rank, which handles them
echo "--- attempt $((${SLURM_RESTART_COUNT:-0} + 1)): rank $SLURM_PROCID on $node, $(date -Is)"
if [ -n "$cache" ]; then
    (umask 077 && mkdir -p "$cache") || {
        echo "$node cannot create $cache for compiled kernels. Set NODE_SCRATCH in cluster/site.env to a local directory" >&2
        end 1
    }
    if [ ! -O "$cache" ] || [ -h "$cache" ] || [ ! -w "$cache" ]; then
        echo "$cache on $node is not a writable directory of this user. Set NODE_SCRATCH in cluster/site.env to a local directory" >&2
        end 1
    fi
fi
"$@"
end $?
