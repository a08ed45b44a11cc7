# shellcheck shell=bash
# The environment of a job: `. cluster/environment.sh SITE_ENV` reads that file. What was given before (sbatch --export=ALL,PREFLIGHT=0)
# counts more than what it sets.
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || { echo "bash 4.4 or newer is needed; this is $BASH_VERSION" >&2; exit 2; }
export JOB_SETTINGS="PREFLIGHT PREFLIGHT_GPUS RANKS_PER_NODE MAX_IDLE_STARTS NODE_SCRATCH STAGE_DATA" JOB_SETTINGS_GIVEN=
export PYTHONIOENCODING=:backslashreplace # no name and no rank's last words stop what only reports them, whatever the locale
unset given && declare -A given
for name in $JOB_SETTINGS; do
    [ -z "${!name+set}" ] || { given[$name]=${!name}; JOB_SETTINGS_GIVEN+=" $name"; }
done
set +eu # modules and activate scripts read what is not set, and end as they like
# shellcheck source=cluster/site.env
[ ! -r "$1" ] || . "$1"
for name in "${!given[@]}"; do export "$name=${given[$name]}"; done
