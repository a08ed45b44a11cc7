#!/bin/bash
# Asks SLURM again for three minutes: controllers have their bad moments when many jobs end at once. Sourced by snapshot and starts.sh.

patiently() { # COMMAND... -> its answer, without what it warns of; fails with its last words
    local answer tries=0
    until answer=$("$@" 2> >(sed 's/^/!/')); do # no temporary file: the disk may be what is bad here
        [[ $answer != *"Invalid job id"* ]] || return 0
        [ $((++tries)) -lt 18 ] || { printf '%s\n' "$answer" | sed 's/^!//' >&2; return 1; }
        sleep 10
    done
    printf '%s' "${answer:+$answer$'\n'}" | grep -v '^!' || :
}
