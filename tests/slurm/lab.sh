#!/bin/bash
# A private SLURM cluster on one machine: munged, slurmctld and a slurmd per node, on loopback. Needs root, slurm-wlm and munge.
#
#   lab.sh DIR PORT     starts it in DIR (a short path: a socket's has at most 107 characters), says "ready", then reads commands:
#                         crash NODE    daemon and tasks die at once
#                         hang NODE     nothing there runs any more, and no connection is closed (as in a power cut)
#                         thaw NODE     all there but srun goes on after a hang
#                         revive NODE   after one of these, with nothing of before
#                         on NODE COMMAND   runs it there, in the node's own namespaces (a mount is seen by that node alone)
#                       The end of its input ends everything. SLURM_CONF=DIR/slurm.conf is all that clients need.
#
# Nodes: n1 to nLAB_NODES (3; 2 CPUs; partitions low, default, which high preempts), g1 (4 CPUs, 4 pretended GPUs; partition gpu).
# LAB_HOSTS=none leaves the nodes' names unresolvable. LAB_SUBMIT_LIMIT=N starts slurmdbd, on a
# database of its own (Debian: slurmdbd, mariadb-server), and lets root have N jobs in the queue (MaxSubmitJobs).
#
# Everything lives in one pid namespace whose pid 1 is this shell, so no process outlives it, however it ends. Each node has its own
# pid and host name namespace inside; the file system and the loopback network are shared.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
if [ -z "${INSIDE_LAB:-}" ]; then
    INSIDE_LAB=1 exec unshare --mount --uts --pid --fork --mount-proc --kill-child "$0" "$@"
fi
lab=$1 port=$2
nodes=${LAB_NODES:-3}
declare -A address=([g1]=127.0.0.10)
for number in $(seq "$nodes"); do address[n$number]=127.0.0.$((10 + number)); done
export SLURM_CONF=$lab/slurm.conf

configure() {
    mkdir -p "$lab"/{state,spool,log}
    head -c 128 /dev/urandom >"$lab/munge.key"
    chmod 600 "$lab/munge.key"
    {
        echo "127.0.0.1 localhost controller"
        [ "${LAB_HOSTS:-}" = none ] || for node in "${!address[@]}"; do echo "${address[$node]} $node"; done
    } >"$lab/hosts"
    for gpu in 0 1 2 3; do ln -s /dev/null "$lab/nvidia$gpu"; done # a character device, or CUDA_VISIBLE_DEVICES is not set
    echo "NodeName=g1 Name=gpu File=$lab/nvidia[0-3]" >"$lab/gres.conf"
    : >"$lab/cgroup.conf"
    cat >"$SLURM_CONF" <<END
ClusterName=lab
SlurmctldHost=controller(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# a requeued job waits until its old credential has expired; 5 s is the least that is taken
AuthInfo=socket=$lab/munge.socket,cred_expire=5
StateSaveLocation=$lab/state
SlurmctldPidFile=$lab/slurmctld.pid
SlurmctldLogFile=$lab/log/slurmctld.log
SlurmdPidFile=$lab/slurmd.%n.pid
SlurmdLogFile=$lab/log/slurmd.%n.log
SlurmdSpoolDir=$lab/spool/%n
# no systemd, cgroups, MPI or mail; nodes claim more CPUs than there are
CommunicationParameters=NoCtldInAddrAny
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
# schedules at once, finds a dead node within seconds, and is patient with a busy machine. Jobs derive their ports from their numbers:
# those of two labs differ, whose nodes share the loopback network.
FirstJobId=$(((port - 5000) / 5 % 60 * 20 + 1))
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SlurmctldTimeout=10
SlurmdTimeout=12
MessageTimeout=30
TCPTimeout=10
KillWait=40
# as sites have it
KillOnBadExit=1
InactiveLimit=0
CompleteWait=0
MinJobAge=7200
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=g1 NodeAddr=${address[g1]} Port=$((port + nodes + 1)) CPUs=4 RealMemory=100000 Gres=gpu:4 State=UNKNOWN
NodeName=n[1-$nodes] NodeAddr=127.0.0.[11-$((10 + nodes))] Port=[$((port + 1))-$((port + nodes))] CPUs=2 RealMemory=100000 State=UNKNOWN
PartitionName=low Nodes=n[1-$nodes] Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=high Nodes=n[1-$nodes] MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
PartitionName=gpu Nodes=g1 MaxTime=INFINITE
END
    [ -z "${LAB_SUBMIT_LIMIT:-}" ] || cat >>"$SLURM_CONF" <<END
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePass=$lab/munge.socket
AccountingStoragePort=$((port + nodes + 2))
AccountingStorageEnforce=associations,limits,qos
END
}

start_accounting() {
    mkdir "$lab/db"
    mariadb-install-db --no-defaults --user=root --datadir="$lab/db" --auth-root-authentication-method=normal --skip-test-db
    mariadbd --no-defaults --user=root --datadir="$lab/db" --socket="$lab/db.socket" --skip-networking --skip-grant-tables \
        --innodb-flush-log-at-trx-commit=0 &
    for _ in {1..300}; do ! mariadb-admin --no-defaults --socket="$lab/db.socket" ping || break; sleep 0.1; done
    cat >"$lab/slurmdbd.conf" <<END
AuthType=auth/munge
AuthInfo=socket=$lab/munge.socket
DbdHost=controller
DbdAddr=127.0.0.1
DbdPort=$((port + nodes + 2))
SlurmUser=root
PidFile=$lab/slurmdbd.pid
LogFile=$lab/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageUser=root
END
    chmod 600 "$lab/slurmdbd.conf"
    SLURM_CONF=$lab/slurmdbd.conf MYSQL_UNIX_PORT=$lab/db.socket slurmdbd
    for _ in {1..100}; do ! sacctmgr -i add cluster lab || break; sleep 0.1; done
    sacctmgr -i add account lab
    sacctmgr -i add user root account=lab
    sacctmgr -i modify user root set MaxSubmitJobs="$LAB_SUBMIT_LIMIT" DefaultAccount=lab
}

start_node() {
    # pid 1 of a node is a shell that reaps what SLURM leaves behind
    # shellcheck disable=SC2016
    unshare --mount --uts --pid --fork --mount-proc --kill-child bash -c \
        'hostname "$0" && slurmd -f "$SLURM_CONF" -N "$0" && while :; do sleep 1000 & wait; done' "$1" \
        </dev/null >>"$lab/log/node.$1.log" 2>&1 &
    echo $! >"$lab/node.$1.pid"
}

stop_node() { # once stopped, it must be killed by its first process: the pid namespace goes with it
    local outer
    outer=$(<"$lab/node.$1.pid")
    kill -KILL "$(first_of "$outer")" "$outer" 2>/dev/null || :
}

signal_node() { # NODE SIGNAL [NAME]: to all that is there, or to those of that name
    local namespace process name
    namespace=$(readlink "/proc/$(first_of "$(<"$lab/node.$1.pid")")/ns/pid")
    for process in /proc/[0-9]*; do
        [ "$(readlink "$process/ns/pid")" = "$namespace" ] || continue
        name=$(<"$process/comm") || continue # it has ended meanwhile
        [ "${3:-$name}" != "$name" ] || kill -"$2" "${process#/proc/}" || :
    done 2>/dev/null
}

first_of() { tr -d ' ' <"/proc/$1/task/$1/children"; }

all_idle() { [ "$(timeout 5 sinfo -h -N -p low,gpu -t idle -o %N 2>/dev/null | wc -l)" = $((nodes + 1)) ]; }

hostname controller
configure
mount --bind "$lab/hosts" /etc/hosts
munged --force --key-file="$lab/munge.key" --socket="$lab/munge.socket" --pid-file="$lab/munged.pid" --num-threads=4 \
    --log-file="$lab/log/munged.log" --seed-file="$lab/munge.seed" 2>>"$lab/log/munged.err"
[ -z "${LAB_SUBMIT_LIMIT:-}" ] || start_accounting </dev/null >>"$lab/log/accounting.log" 2>&1 ||
    { cat "$lab"/log/{accounting,slurmdbd}.log >&2; exit 1; }
slurmctld -f "$SLURM_CONF" -i </dev/null >>"$lab/log/start.log" 2>&1
for node in "${!address[@]}"; do start_node "$node"; done
tries=0
until all_idle; do
    [ $((tries++)) -lt 400 ] || { cat "$lab"/log/*.log >&2; exit 1; }
    sleep 0.05
done
echo ready
while read -r verb node command; do
    case $verb in
        crash) stop_node "$node" ;;
        hang) signal_node "$node" STOP ;;
        thaw) # all but srun: once awake, it may abort "step 0 of the job", which is the next start's by then
            signal_node "$node" KILL srun
            signal_node "$node" CONT
            ;;
        revive) stop_node "$node" && start_node "$node" ;;
        on) nsenter --target "$(first_of "$(<"$lab/node.$node.pid")")" --mount --uts --pid bash -c "$command" >&2 || continue ;;
        *) echo "unknown: $verb" && continue ;;
    esac
    echo "done"
done
