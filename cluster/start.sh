# shellcheck shell=bash
# Start a job: find its snapshot, read site.env, and run cluster/job.py. *.slurm sources this file from $code/cluster, with the words of
# that program. It uses Python of .venv, or the node's own if .venv does not run: then job.py names the node.
# No signal is lost: this shell records it in a file before passing it on. job.py ignores signals until it can receive them, then reads
# the file. (A signal from job.py would be one too many: bash may forget one of two that interrupt a `wait`.)
export STOPPED=jobs/.stopped-$SLURM_JOB_ID-$$
rm -f "$STOPPED" # of an earlier killed start with the same number
trap 'mkdir -p jobs; : >"$STOPPED"; [ -z "$job" ] || kill -USR2 "$job"' USR2 TERM # before anything slow
job=''
cd -P . || exit 1 # the path that realpath prints, not a link
# shellcheck disable=SC2154 # `code` and `kept` are the job script's
snapshot=$("$code/cluster/snapshot" --of-job "$kept" "$@") || { echo "not started (see above). Submit the job again, from the repository root" >&2; exit 2; }
# shellcheck source=cluster/environment.sh
. "$snapshot/cluster/environment.sh" "$snapshot/cluster/site.env"
export PYTHONPATH=$snapshot PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONNOUSERSITE=1 # packages in ~/.local would shadow the locked ones
for python in .venv/bin/python python3 python3.{13..9} ''; do
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null && break
done
[ -n "$python" ] || { echo "not started: $(hostname) has no Python 3.9 or newer, neither .venv/bin/python nor its own" >&2; exit 2; }
(trap '' USR2 TERM; exec "$python" "$snapshot/cluster/job.py" "$@") &
job=$!
while kill -0 "$job" 2>/dev/null; do wait "$job"; done # a trap interrupts `wait`
wait "$job"
code=$?
rm -f "$STOPPED"
exit "$code"
