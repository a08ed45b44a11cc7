# shellcheck shell=bash
# The first seconds of every job: finds the kept code, reads site.env, and becomes cluster/job.py. Sourced by *.slurm with the words of
# that program. The Python is .venv's, or where that does not run the node's own: then job.py names the node.
trap 'stopped=1' USR2 TERM # before anything that takes its time
cd -P . || exit 1 # as realpath sees it, where a link leads here
snapshot=$(cluster/snapshot --of-job "$@") || { echo "not started; jobs are submitted from the repository root" >&2; exit 2; }
# shellcheck source=cluster/environment.sh
. "$snapshot/cluster/environment.sh" "$snapshot/cluster/site.env"
export PYTHONPATH=$snapshot PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
for python in .venv/bin/python python3 /usr/bin/python3; do
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null && break
done
trap '' USR2 TERM # until job.py listens, a moment later
STOPPED=${stopped:-} exec "$python" "$snapshot/cluster/job.py" "$@"
