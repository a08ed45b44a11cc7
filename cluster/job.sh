#!/bin/bash
# The life of a job, from its start to its end or its next start. Sourced by every *.slurm, which then calls one of
#
#   run_verb PROGRAM VERB CONFIG [key=value ...]     ranks of ours, until their run_dir holds result.json
#   run_tool WORDS...                                one process for each node, until it exits with 0
#
# Protocol: 1. The config is checked, here, in a second or two. 2. Each node is measured. 3. The ranks run. 4. USR2 (300 s before the
# limit, or at preemption) and TERM are passed on to them: they save at a step boundary and exit with 0. 5. An unfinished job puts itself
# back in the queue, without the nodes that were found bad; unless the config is wrong, it was cancelled, or it gets nowhere. Only
# Python's own exit code 2, at the first start that gets so far, says that the config is wrong: whatever else goes wrong may be the
# node's fault, until a second node says the same.
#
# $job_dir (jobs/JOBID or jobs/ARRAY_TASK) has the logs of all ranks, how each start began and ended, and the bad nodes.
# shellcheck disable=SC2154,SC2317,SC2329  # snapshot is set by those that source this; functions are called by starts.sh
set -uo pipefail
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || { echo "bash 4.4 or newer is needed; here it is $BASH_VERSION" >&2; exit 2; }
cd -P . || exit 1 # as realpath sees it, where a link leads here

me=$SLURM_JOB_NAME
# SLURM's answers are read here, whatever the user likes to see; each rank sees all GPUs, however they were asked for
export SLURM_TIME_FORMAT=standard
unset "${!SQUEUE_@}" "${!SINFO_@}" SLURM_GPUS_PER_TASK SLURM_GPU_BIND SLURM_NTASKS_PER_GPU SLURM_TRES_PER_TASK
say() { echo "$me $(date +%FT%T): $*"; }
fail() { say "$1" >&2; exit "${2:-1}"; }

job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID} && job=${job:-$SLURM_JOB_ID}
job_dir=jobs/$job restarts=${SLURM_RESTART_COUNT:-0}
mkdir -p "$job_dir" || fail "cannot write $PWD/$job_dir"

# The scripts have set the trap: USR2, because NCCL takes USR1; TERM as well, for at preemption sites send the one or the other (some
# only to the ranks).
stopped=${stopped:-} code=0 reads=()

# shellcheck source=cluster/given.sh
. "$snapshot/cluster/given.sh" && note_given
set +u # modules and activate scripts read what is not set
# shellcheck source=cluster/site.env
[ ! -r "$snapshot/cluster/site.env" ] || . "$snapshot/cluster/site.env"
set -u
put_given_back
export PYTHONPATH=$snapshot PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
# shellcheck source=cluster/python.sh
. "$snapshot/cluster/python.sh" && python_command
# shellcheck source=cluster/starts.sh
. "$snapshot/cluster/starts.sh"

# Compiled kernels on the node itself (locks on NFS stall) and in our own directory only: they are loaded as code.
cache=${NODE_SCRATCH:-/tmp}/wide-mlps-$UID
export TRITON_CACHE_DIR=$cache/triton TORCHINDUCTOR_CACHE_DIR=$cache/inductor TORCH_EXTENSIONS_DIR=$cache/extensions

kept() { # a file of the command line, as it was when the job was submitted
    local whole copy
    whole=$(realpath -s "$1")
    for copy in "$snapshot/${whole#"$PWD"/}" "$snapshot/given$whole"; do
        [ ! -f "$copy" ] || { echo "$copy" && return; }
    done
    [ ! -f "$1" ] || fail "$1 was not kept at the submission; put it into configs/" 2
    echo "$1"
}

progress() { echo unknown; } # what is called knows more

settle_ranks() { # how many, and where they meet
    gpus=${SLURM_GPUS_ON_NODE:-0}
    ranks=${RANKS_PER_NODE:-$((gpus > 0 ? gpus : 1))}
    cpus=$(sed 's/([^)]*)//g; s/,/\n/g' <<<"$SLURM_JOB_CPUS_PER_NODE" | sort -n | head -n 1) # of the smallest node
    cpus=$((cpus > ranks ? cpus / ranks : 1))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus}
    # This node is the first, and rank 0's. torch waits minutes for a name that does not resolve: then the address in SLURM.
    local node all facts slurm_address
    node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    all=$(scontrol -o show node "$SLURM_JOB_NODELIST")
    facts=$(grep "^NodeName=$node " <<<"$all")
    slurm_address=$(sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p' <<<"$facts")
    gpus_of_node=$(gpus_in "$facts") && gpus_of_node=${gpus_of_node:-0}
    settle_gpus "$all"
    for MASTER_ADDR in "$node" "$slurm_address" "$(hostname -I | cut -d ' ' -f 1)"; do
        timeout 5 getent ahosts "$MASTER_ADDR" >/dev/null && break
    done
    # Below the ephemeral ports; another for each job and each start, whose ranks may linger; the next one if it is taken.
    MASTER_PORT=$((10000 + (SLURM_JOB_ID * 16 + 2 * restarts) % 20000)) # and the one after it: the pre-flight has its own
    next_free_port
    export MASTER_ADDR MASTER_PORT
}

gpus_in() { # FACTS of nodes, a line each -> how many GPUs SLURM has there, where it says so
    awk 'match($0, /gres\/gpu=[0-9]+/) { print substr($0, RSTART + 9, RLENGTH - 9) }' <<<"$1"
}

settle_gpus() { # FACTS of its nodes: what cannot work, or would leave GPUs idle, is said
    local least idle
    least=$(gpus_in "$1" | sort -n | head -n 1)
    [ "${least:-$gpus}" -ge "$gpus" ] ||
        fail "its nodes have from $least to $gpus GPUs and more; ask for as many of each: --gpus-per-node=N, or --constraint" 2
    idle=$([ "$gpus" -gt 0 ] || [ -n "${RANKS_PER_NODE:-}" ] || timeout 20 nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
    [ "${idle:-0}" -lt 2 ] || say "WARNING: $node has $idle GPUs, and the job has asked for none: one rank takes one of them." \
        "Ask for them (SBATCH_GPUS_PER_NODE=$idle in cluster/site.env), or set RANKS_PER_NODE=$idle"
}

next_free_port() { while (: </dev/tcp/127.0.0.1/"$MASTER_PORT") 2>/dev/null; do MASTER_PORT=$((MASTER_PORT + 1)); done; }

# --wait, and no --kill-on-bad-exit, which sites may have as their default: that kills ranks that are about to exit with 2, and srun's
# code is no rank's. The pre-flight's first rank waits longer than that for those that do not come, to name them.
# --gres: with --exclusive steps get no GPU unasked; each rank sees all. --export: against SBATCH_EXPORT=NONE.
# SLURM_WAIT: how many seconds after the first rank has ended those that hang are killed; longer than a checkpoint's last write.
run_step() { # NAME WORDS... -> $code; one log for each task, that of the first shown in the job's
    local log=$job_dir/$1 srun tail ends=$job_dir/ends/$1.$restarts wait_s=${SLURM_WAIT:-45} patience_s=${PREFLIGHT_TIMEOUT_S:-60}
    [ "$1" != preflight ] || wait_s=$((8 * (${patience_s%.*} + 1)))
    shift
    local options=(--nodes="$SLURM_JOB_NUM_NODES" --ntasks=$((SLURM_JOB_NUM_NODES * ranks)) --ntasks-per-node="$ranks"
        --cpus-per-task="$cpus" --wait="$wait_s" --kill-on-bad-exit=0 --export=ALL --open-mode=append --output="$log-%4t.log"
        "${container_options[@]}")
    [ "$gpus" -eq 0 ] || options+=(--gres="gpu:$gpus")
    rm -rf "$ends" && mkdir -p "$ends"
    touch "$log-0000.log"
    tail -q -s 0.2 -F -c +$(($(stat -c %s "$log-0000.log") + 1)) "$log-0000.log" 2>/dev/null &
    tail=$!
    srun "${options[@]}" bash "$snapshot/cluster/rank.sh" "$ends" "$cache" "$@" &
    srun=$!
    # To srun, which tells all ranks (at TERM it would kill them), again and again: what comes while they start is lost.
    while kill -0 $srun 2>/dev/null; do
        [ -z "$stopped" ] || kill -USR2 $srun
        sleep 10 &
        wait -n $srun $! # a trap ends it at once
    done
    wait $srun; code=$?
    sleep 0.5 # for the last lines
    kill $tail 2>/dev/null; wait $tail 2>/dev/null
    [ "$code" -eq 0 ] || [ "$code" -eq 3 ] || [ -n "$stopped" ] || show_first_failure "$ends" "$log"
}

show_first_failure() { # ENDS LOG: of the ranks' own ends the earliest bad one; of those of the same second, one that has said why
    local ends first rank node code log words
    ends=$(cat "$1"/* 2>/dev/null | LC_ALL=C sort -n)
    [ -n "$ends" ] || { say "no rank has recorded its end (see srun's lines above): was a node lost, or SLURM's daemon there?"; return; }
    first=${ends%%.*}
    while read -r _ rank node code; do
        log=$(printf '%s-%04d.log' "$2" "$rank")
        words=$(tac "$log" 2>/dev/null | sed '/^--- start /Q' | head -n 20 | tac)
        [ -z "$words" ] || break
    done < <(awk -v first="$first" '$1 <= first + 2' <<<"$ends")
    [ -n "$words" ] || read -r _ rank node code <<<"$ends"
    case $code in
        137) code="$code, by signal KILL: out of memory?" ;;
        13[0-9] | 14[0-9]) code="$code, by signal $(kill -l $((code - 128)))" ;;
    esac
    say "rank $rank on $node failed first, with exit code $code; the last lines of $(printf '%s-%04d.log' "$2" "$rank"):"
    echo "    ${words//$'\n'/$'\n'    }"
}

preflight() { # ends the job for its next start if a node is bad
    [ "${PREFLIGHT:-1}" != 0 ] || return 0
    local known path options=(--fleet jobs/fleet.jsonl --check-dir "$(dirname "$run_dir")")
    known=$(num_bad_nodes)
    for path in "${reads[@]}"; do options+=(--read "$path"); done
    [ "$gpus" -ge "$gpus_of_node" ] || options+=(--part-of-node)
    cache='' run_step preflight "${python[@]}" -m cluster.preflight "$job_dir" "${options[@]}"
    MASTER_PORT=$((MASTER_PORT + 1)) && next_free_port
    if [ "$(num_bad_nodes)" -gt "$known" ]; then end_start bad-node; start_again; fi
    ! was_stopped || stopped=1
    [ "$code" -eq 0 ] || [ -n "$stopped" ] || say "WARNING: the pre-flight could not be made ($code); going on without it"
}

this_node_is_bad() { # REASON
    say "${SLURMD_NODENAME:-$(hostname)} is bad: $1"
    printf '%s\t%s\n' "${SLURMD_NODENAME:-$(hostname)}" "$1" >>"$job_dir/bad-nodes"
    begin_start
    end_start bad-node
    start_again
}

bad_here() { # REASON: of one node it is that node's fault; of two it is not
    ! cut -f 2- "$job_dir/bad-nodes" 2>/dev/null | grep -qxF "$1" || fail "$1; on $(bad_nodes | paste -sd ,) as well" 2
    this_node_is_bad "$1"
}

was_stopped() { case $code in 130 | 138 | 140 | 143) ;; *) false ;; esac; } # by a signal, or as after Ctrl-C

# ---- what the scripts call --------------------------------------------------------------------------------------------------------

run_verb() {
    [ $# -ge 3 ] || fail "no config given; sbatch cluster/$me.slurm CONFIG [key=value ...]" 2
    [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || [ -n "${is_member:-}" ] ||
        fail "an array of one run would fight over it; many runs are a plan: cluster/submit PLAN" 2
    local config extra=()
    config=$(kept "$3") || exit 2
    work=("$1" "$2" "$config" "${@:4}")
    ask_python config state_of_work_at_start
    { read -r state; read -r run_dir; read -r staging; mapfile -t reads; } <<<"$answer"
    [ "$state" != finished ] || { say "$run_dir: finished before; name another run_dir to do it anew"; exit 0; }
    [[ $state != blind* ]] || bad_here "${state#blind: } is not there"
    [[ $state != taken* ]] || fail "$run_dir is $state, which was started first; submit this again when it has ended"
    [ "${STAGE_DATA:-0}" = 0 ] || [ "$staging" != "can stage" ] || extra=(data.stage_dir="$cache/data")
    finished() { [[ $(state_of_work) = finished* ]]; }
    # what changes whenever a start was of use
    progress() { find "$run_dir" -maxdepth 3 \( -path '*/checkpoints/latest' -o -name result.json \) -exec cat {} + 2>/dev/null | cksum; }
    settle_ranks
    live "${python[@]}" -m "$1" "$2" "$config" "${extra[@]}" "${@:4}"
}

ask_python() { # QUESTION WORDS... -> $answer; where it says 2 the config is wrong, and where Python does not run this node is bad
    local was_good=$job_dir/$1-was-good
    answer=$("${@:2}"); code=$?
    [ "$code" -ne 0 ] || { : >"$was_good"; return; }
    ! was_stopped || stopped=1
    [ -z "$stopped" ] || { begin_start; end_start stopped; start_again; }
    [ "$code" -ne 2 ] || [ -e "$was_good" ] || fail "the config will not do; not started" 2
    "${python_here[@]}" -c '' || this_node_is_bad "Python does not run there (exit code $?, see above)"
    # a config that was good at a start before has not become bad: this node may see less, or the run_dir is another's by now
    bad_here "the check of the config failed there (exit code $code, see above)"
}

state_of_work() { "${python_here[@]}" -m cluster.job "${work[@]}"; }

state_of_work_at_start() { "${python_here[@]}" -m cluster.job "${work[@]}" --starting; }

run_tool() {
    run_dir=$job_dir
    finished() { [ "$code" -eq 0 ] && [ -z "$stopped" ]; }
    RANKS_PER_NODE=1 settle_ranks
    PREFLIGHT=0 live "$@"
}

met_lock() { [ "$(cut -d ' ' -f 4 "$job_dir/ends/rank.$restarts/0" 2>/dev/null)" = 75 ]; } # BUSY of pretrain: another start holds it

live() { # progress and finished say how far it is
    give_up_if_idle # the starts before have ended without a word
    [ "$(tail -n 1 "$job_dir/starts" 2>/dev/null | cut -d ' ' -f 1)" != begin ] ||
        say "the start before has ended without a word: was its node lost?"
    begin_start
    say "start $((restarts + 1)): $SLURM_JOB_NUM_NODES x $ranks ranks on $SLURM_JOB_NODELIST, $MASTER_ADDR:$MASTER_PORT," \
        "code in ${snapshot#"$PWD"/} ($(<"$snapshot/COMMIT")), logs in $job_dir"
    preflight
    [ -n "$stopped" ] || run_step rank "$@"
    ! finished || { end_start finished; exit 0; }
    if met_lock; then
        say "$run_dir is held by another start (see above), which is no failure of this one"
        end_start busy
        start_again
    fi
    [ "$code" -ne 2 ] || has_trained || { end_start refused; exit 2; }
    # Ranks that were told to stop exit with 0, whoever told them.
    if [ "$code" -eq 0 ] || was_stopped; then stopped=1; fi
    say "$run_dir is not finished: ${stopped:+$(why_stopped), }srun ended with $code"
    if [ -n "$stopped" ]; then end_start stopped; else end_start failed; fi
    start_again
}
