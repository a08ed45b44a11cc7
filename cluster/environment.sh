# shellcheck shell=bash
# Set the environment of a job: `. cluster/environment.sh SITE_ENV` reads that file. Variables that are already set override the file,
# for example after sbatch --export=ALL,PREFLIGHT=0.
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || { echo "bash 4.4 or newer is required, not $BASH_VERSION. Use another node, or ask the site" >&2; exit 2; }
export JOB_SETTINGS="PREFLIGHT RANKS_PER_NODE MAX_IDLE_STARTS NODE_SCRATCH STAGE_DATA" JOB_SETTINGS_GIVEN=
export PYTHONIOENCODING=:backslashreplace # text that the locale cannot show ends no program
unset given && declare -A given
for name in $JOB_SETTINGS; do
    [ -z "${!name+set}" ] || { given[$name]=${!name}; JOB_SETTINGS_GIVEN+=" $name"; }
done
set +eu # modules and activate scripts read unset variables, and may fail
# shellcheck source=cluster/site.env
[ ! -r "$1" ] || . "$1"
for name in "${!given[@]}"; do export "$name=${given[$name]}"; done
