# shellcheck shell=bash
# What a job takes from the environment in which it is submitted. What is given there (sbatch --export=ALL,PREFLIGHT=0) counts more than
# what its site.env says. To be sourced, before site.env.
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

as_new_job() { # SBATCH...: what site.env says, the job reads itself, on its own node; which job, array and start this is, is not its business
    local name words=()
    for name in "${JOB_SETTINGS[@]}"; do [ -n "${given[$name]+set}" ] || words+=(-u "$name"); done
    for name in "${!SLURM_@}"; do
        case $name in SLURM_CONF | SLURM_CLUSTERS | SLURM_JWT | SLURM_WAIT) ;; *) words+=(-u "$name") ;; esac
    done
    env "${words[@]}" "$@"
}
