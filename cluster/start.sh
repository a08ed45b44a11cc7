# shellcheck shell=bash
# The first seconds of every job: finds the kept code, reads site.env, and runs cluster/job.py. Sourced by *.slurm with the words of
# that program, from $code/cluster. The Python is .venv's, or where that does not run the node's own: then job.py names the node.
# No signal is lost: this shell notes it before it passes it on, and job.py, which ignores signals until it can receive them, then looks
# for the note. (A signal for "now I can" would be one too many: bash may forget one of two that interrupt a `wait`.)
export STOPPED=jobs/.stopped-$SLURM_JOB_ID-$$
rm -f "$STOPPED" # of a start before that was killed, with the same number
trap 'mkdir -p jobs; : >"$STOPPED"; [ -z "$job" ] || kill -USR2 "$job"' USR2 TERM # before anything that takes its time
job=''
cd -P . || exit 1 # as realpath sees it, where a link leads here
# shellcheck disable=SC2154 # `code` and `kept` are the job script's
snapshot=$("$code/cluster/snapshot" --of-job "$kept" "$@") || { echo "not started; jobs are submitted from the repository root" >&2; exit 2; }
# shellcheck source=cluster/environment.sh
. "$snapshot/cluster/environment.sh" "$snapshot/cluster/site.env"
export PYTHONPATH=$snapshot PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONNOUSERSITE=1 # packages in ~/.local would shadow the locked ones
for python in .venv/bin/python python3 python3.{13..9} ''; do
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null && break
done
[ -n "$python" ] || { echo "not started; $(hostname) has no Python 3.9 or newer, neither .venv/bin/python nor its own" >&2; exit 2; }
(trap '' USR2 TERM; exec "$python" "$snapshot/cluster/job.py" "$@") &
job=$!
while kill -0 "$job" 2>/dev/null; do wait "$job"; done # a trap interrupts `wait`
wait "$job"
code=$?
rm -f "$STOPPED"
exit "$code"
