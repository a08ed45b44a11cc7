# shellcheck shell=bash
# What is given for a job (sbatch --export=ALL,PREFLIGHT=0) counts more than what its site.env says. To be sourced, before site.env.
JOB_SETTINGS=(PREFLIGHT PREFLIGHT_GPUS RANKS_PER_NODE MAX_IDLE_STARTS NODE_SCRATCH STAGE_DATA)
declare -A given=()

note_given() {
    local name
    for name in "${JOB_SETTINGS[@]}"; do [ -z "${!name+set}" ] || given[$name]=${!name}; done
}

put_given_back() {
    local name
    for name in "${!given[@]}"; do export "$name=${given[$name]}"; done
}

without_sites_own() { # COMMAND...: the job that it submits reads site.env itself, on its own node
    local name words=()
    for name in "${JOB_SETTINGS[@]}"; do [ -n "${given[$name]+set}" ] || words+=(-u "$name"); done
    env "${words[@]}" "$@"
}
