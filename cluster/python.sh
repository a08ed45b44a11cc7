# shellcheck shell=bash
# How a job starts Python: from .venv, or in the container that cluster/site.env names. To be sourced by bash in the repository
# root, after site.env and after PYTHONPATH is set. `python_command` sets three arrays:
#
#   python             the words that start Python on a node, under srun:  srun "${container_options[@]}" ... "${python[@]}" -m pretrain
#   container_options  options for that srun: Pyxis' own; empty for Apptainer and .venv
#   python_here        the words that start Python outside srun, on a job's first node (or, without a job, here). The same as
#                      `python`, but for Pyxis, which makes containers in srun alone: there .venv if there is one, otherwise
#                      a step of one task beside the others; empty where neither is possible (no .venv, no job)
#
# In a container: the repository is seen at its own path, with CONTAINER_MOUNTS and NODE_SCRATCH; variables of the job are passed
# on, ours against the image's own; packages in the user's ~/.local are not used, for they would shadow the locked ones.

# The environment of cluster/apptainer.def, if the image is one of these; otherwise the image's own python3.
# shellcheck disable=SC2016  # the shell in the container expands it
in_container=(/bin/sh -c 'PATH=/opt/wide-mlps/.venv/bin:$PATH exec python3 "$@"' python3)

# shellcheck disable=SC2034  # whoever sources this reads them
python_command() {
    container_options=()
    if [ -n "${APPTAINER_IMAGE:-}" ]; then
        apptainer_command
    elif [ -n "${PYXIS_IMAGE:-}" ]; then
        pyxis_command
    else
        python=(.venv/bin/python)
        python_here=("${python[@]}")
    fi
}

# shellcheck disable=SC2034
apptainer_command() {
    local program=apptainer passed=APPTAINERENV_ name mounts=$PWD
    command -v apptainer >/dev/null || { program=singularity passed=SINGULARITYENV_; }
    mounts+=${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}${NODE_SCRATCH:+,$NODE_SCRATCH}
    # The variables of this prefix win over those that an image sets for itself.
    for name in PYTHONPATH PYTHONSAFEPATH; do
        [ -z "${!name:-}" ] || export "$passed$name=${!name}"
    done
    export "${passed}PYTHONNOUSERSITE=1"
    python=("$program" exec --bind "$mounts" --pwd "$PWD")
    [ ! -e /dev/nvidiactl ] || python+=(--nv)
    python+=("$APPTAINER_IMAGE" "${in_container[@]}")
    python_here=("${python[@]}")
}

# shellcheck disable=SC2034
pyxis_command() {
    local mounts=$PWD:$PWD each wanted
    IFS=, read -r -a wanted <<<"${CONTAINER_MOUNTS:-}${NODE_SCRATCH:+,$NODE_SCRATCH}"
    for each in "${wanted[@]}"; do
        case $each in
            "") ;;
            *:*) mounts+=,$each ;;
            *) mounts+=,$each:$each ;;
        esac
    done
    export PYTHONNOUSERSITE=1
    # shellcheck disable=SC2054  # commas within a word
    container_options=(--container-image="$PYXIS_IMAGE" --container-mounts="$mounts" --container-workdir="$PWD"
        --container-env=PYTHONPATH,PYTHONSAFEPATH,PYTHONNOUSERSITE)
    python=("${in_container[@]}")
    if [ -x .venv/bin/python ]; then
        python_here=(.venv/bin/python)
    elif [ -n "${SLURM_JOB_ID:-}" ]; then
        python_here=(srun --overlap --export=ALL --nodes=1 --ntasks=1 --nodelist="$(hostname -s)"
            "${container_options[@]}" "${python[@]}")
    else
        python_here=()
    fi
}
