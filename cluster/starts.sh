#!/bin/bash
# When a job starts again, and when it gives up. Sourced by job.sh, whose names it uses ($job, $job_dir, progress).
#
# $job_dir/starts has two lines for each start: "begin RESTART MARK NODES TIME" and "end RESTART MARK HOW TIME SECONDS", where MARK is a
# checksum of the run's checkpoints, or "unknown". A start without an end is one whose node was lost. Starts that left the mark as they
# found it got nowhere. One that waited in vain for another start's lock (busy) has not failed.
# shellcheck disable=SC2154

# shellcheck source=cluster/patiently.sh
. "$snapshot/cluster/patiently.sh"

mark() { progress | tr ' ' -; }

begin_start() { record begin "$SLURM_JOB_NODELIST"; }

end_start() {
    # SLURM counts on as soon as it takes the job back, so a start that is requeued still says how it ended. One whose node was frozen
    # may wake up when the next has begun: then it says nothing, and puts nothing back.
    local newest
    newest=$(about_job Restarts)
    if [ "${newest:-$restarts}" -le "$restarts" ]; then record end "$1" "$SECONDS"; return; fi
    [ "$(tail -n 1 "$job_dir/starts" | cut -d ' ' -f 1,2)" != "begin $restarts" ] || record end "$1" "$SECONDS"
    fail "SLURM has taken the job back; this was start $((restarts + 1)), the next is start $((newest + 1))"
}

has_trained() { awk '$1 == "end" && $4 !~ /^(bad-node|busy)$/ { found = 1 } END { exit !found }' "$job_dir/starts"; } # at an earlier start

record() { # or a job that cannot write would start again for ever
    echo "$1 $restarts $(mark) $2 $(date -Is)${3:+ $3}" >>"$job_dir/starts" || fail "cannot write $job_dir/starts; not started again"
}

# Prints how many of the last starts failed, how many ended otherwise, all at the present mark; how many failed in a row at any mark
# within the hour (two jobs that share a run_dir: the one fails as long as the other makes progress); and how many of the others were busy.
idle_starts() {
    [ -e "$job_dir/starts" ] || return 0
    awk -v now="$(mark)" '
        $1 == "begin" { count++; began[count] = $3; how[count] = "lost" }
        $1 == "end" { how[count] = $4; lasted[count] = $6 }
        END {
            for (i = count; i > 0 && (began[i] == now || began[i] == "unknown"); i--) {
                if (how[i] == "failed") failed++; else other++
                if (how[i] == "busy") busy++
            }
            for (i = count; i > 0 && how[i] == "failed" && lasted[i] < 3600; i--) in_a_row++
            print failed + 0, other + 0, in_a_row + 0, busy + 0
        }' "$job_dir/starts"
}

give_up_reason() { # fails while there is none
    local failed=0 other=0 in_a_row=0 busy=0 limit=${MAX_IDLE_STARTS:-3}
    local hint="Is the time limit too short, or preemption too frequent for checkpoint.every?"
    read -r failed other in_a_row busy < <(idle_starts)
    [ $((2 * ${busy:-0})) -le "${other:-0}" ] ||
        hint="$busy of them met another start that holds $run_dir, and that the log names: end that one, or wait for its end."
    if [ "${failed:-0}" -ge "$limit" ]; then
        echo "failed $failed times without a new checkpoint (MAX_IDLE_STARTS=$limit); not started again." \
            "See $job_dir; submit it again to go on"
    elif [ $((failed + other)) -ge $((3 * limit)) ]; then
        echo "$((failed + other)) starts without a new checkpoint (3 x MAX_IDLE_STARTS), $failed of them failures; not started again." \
            "$hint See $job_dir/starts; submit it again to go on"
    elif [ "${in_a_row:-0}" -ge $((3 * limit)) ]; then
        echo "failed $in_a_row times in a row, though there were new checkpoints; not started again. Does another job write $run_dir?"
    else
        return 1
    fi
}

why_stopped() { # in words, for the log
    local times
    times=$(scontrol -o show job "$job" 2>/dev/null | sed -n 's/.* StartTime=\([^ ]*\).* PreemptTime=\([^ ]*\).*/\1 \2/p')
    # whole seconds: a preemption before this start was earlier than that, for what is requeued waits
    if [[ -n $times && ! ${times#* } < ${times% *} && $times != *None ]]; then echo "it was preempted"; else echo "its ranks were told to stop"; fi
}

give_up_if_idle() {
    local reason
    if reason=$(give_up_reason); then fail "$reason"; fi
}

start_again() { # back into the queue, or the end with the reason
    local state
    state=$(patiently squeue -h -j "$job" -o %T) || fail "SLURM does not answer; submit it again to go on"
    [ "$state" = RUNNING ] || fail "SLURM is ending this start (${state:-gone}): the job was cancelled or requeued, or a node failed"
    give_up_if_idle
    check_nodes_left
    local avoided
    avoided=$(nodes_to_avoid)
    say "requeueing"
    stopped=''
    # SLURM then tells all processes of this start to end: also the scontrol that asks for it, and the next one
    (trap '' USR2 TERM && patiently scontrol requeue "$job" && exclude "$avoided") ||
        fail "the job cannot be requeued here; submit it again to go on"
    # SLURM mostly tells this shell that it has taken the job back, and kills it after KillWait: no need to wait for that
    for _ in {1..30}; do [ -z "$stopped" ] || break; sleep 0.1; done
    exit 1
}

num_bad_nodes() { cat "$job_dir/bad-nodes" 2>/dev/null | wc -l; }

# A job whose nodes do not suffice would pend for ever.
check_nodes_left() {
    [ -s "$job_dir/bad-nodes" ] || return 0
    local others features wanted
    wanted=$(scontrol show hostnames "$(about_job ReqNodeList)" 2>/dev/null | grep -xFf <(bad_nodes) | paste -sd ,)
    [ -z "$wanted" ] || fail "not started again: $wanted will not do, and --nodelist asks for it; submit it again without"
    features=$(about_job Features)
    case $features in *[!A-Za-z0-9_.\&-]*) features= ;; esac # none, or more than a list of what nodes must have
    others=$(patiently sinfo -h -N -p "$SLURM_JOB_PARTITION" -o "%N %f") || return 0
    others=$(awk -v wanted="$features" '
        { count = split(wanted, words, "&"); for (i = 1; i <= count; i++) if (!index("," $2 ",", "," words[i] ",")) next; print $1 }
        ' <<<"$others" | sort -u | grep -cvxFf <(bad_nodes))
    [ "$others" -ge "$SLURM_JOB_NUM_NODES" ] ||
        fail "not started again: without $(bad_nodes | paste -sd ,) partition $SLURM_JOB_PARTITION has $others nodes${features:+ with $features}; submit it again with \
fewer --nodes"
}

bad_nodes() { cut -f 1 "$job_dir/bad-nodes" | sort -u; }

nodes_to_avoid() { # the bad ones, with those that the job was told to avoid
    [ -s "$job_dir/bad-nodes" ] || return 0
    { bad_nodes; about_job ExcNodeList; } | paste -sd ,
}

# Only a pending job's nodes can be chosen, and only now is it one: SLURM lets this shell go on for KillWait, ours to use.
exclude() { # NODES
    [ -n "$1" ] || return 0
    local tries=0
    until scontrol update JobId="$job" ExcNodeList="$1" 2>/dev/null; do
        [ $((++tries)) -lt 20 ] || { say "WARNING: $1 could not be excluded from the next start"; return 0; }
        sleep 0.2
    done
    say "the next start avoids $1"
}

about_job() { # FIELD -> what SLURM says of the job; nothing where it says (null)
    scontrol -o show job "$job" | sed -n "s/.* $1=\([^ ]*\).*/\1/p" | head -n 1 | grep -vxF '(null)'
}
