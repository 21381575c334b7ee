#!/bin/bash
# A real Slurm of virtual nodes on this one machine, for tests. Needs root and, on Debian:
#
#   apt-get install --no-install-recommends slurmctld slurmd slurm-client munge libpmix2
#   ln -sf libpmix.so.2 /usr/lib/x86_64-linux-gnu/pmix2/lib/libpmix.so    # for srun --mpi=pmix
#
# tinyslurm.sh start DIR PORT [NODES] [CPUS] [GPUS]   nodes n0, n1, ... on ports from PORT on; then use
#                                                     SLURM_CONF=DIR/slurm.conf
# tinyslurm.sh stop DIR
set -euo pipefail
PATH=$PATH:/usr/sbin
action=$1
dir=$(realpath -m "$2")
export SLURM_CONF=$dir/slurm.conf

# A process that nobody has waited for stays in the table, but is not alive.
alive() { grep -qs '^State:.[^ZX]' "/proc/$1/status"; }

if [ "$action" = stop ]; then
    # Steps first: what they left running would outlive their daemons.
    scancel --user="$(id -un)" 2>/dev/null && sleep 1
    for file in "$dir"/pid/n* "$dir"/pid/slurmctld "$dir"/pid/munged; do
        [ -e "$file" ] || continue
        pid=$(cat "$file")
        kill "$pid" 2>/dev/null || true
        for _ in $(seq 100); do
            alive "$pid" || break
            sleep 0.1
        done
        if alive "$pid"; then kill -KILL "$pid"; fi
        rm -f "$file"
    done
    exit 0
fi

port=$3 nodes=${4:-4} cpus=${5:-2} gpus=${6:-2}
host=$(hostname -s)
last=$((nodes - 1))
mkdir -p "$dir"/{munge,state,spool,log,tmp,dev,pid}
chmod 755 "$dir" "$dir/munge"
for i in $(seq 0 $last); do
    mkdir -p "$dir/tmp/n$i"
    chmod 1777 "$dir/tmp/n$i"
done
# To Slurm a GPU is a device file. A second /dev/null will do.
for i in $(seq 0 $((gpus - 1))); do
    [ -e "$dir/dev/nvidia$i" ] || mknod "$dir/dev/nvidia$i" c 1 3
done
dd if=/dev/urandom of="$dir/munge/key" bs=1024 count=1 2>/dev/null
chmod 600 "$dir/munge/key"

# TmpFS with %n: PMIx servers of nodes that share /tmp would collide.
# CPUs above the real count make Open MPI fail in MPI_Init.
# FirstJobId: MPICH names its shared memory after job and step, and killed ranks leave it to the next of that name.
# cred_expire: a requeued job waits until its old credential has expired.
cat > "$SLURM_CONF" <<EOF
ClusterName=tiny
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
TmpFS=$dir/tmp/%n
SlurmctldPidFile=$dir/state/slurmctld.pid
SlurmdPidFile=$dir/spool/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
KillWait=5
MinJobAge=300
JobRequeue=1
FirstJobId=$(($(date +%s) % 60000000 + 1))
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1
GresTypes=gpu
NodeName=n[0-$last] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] \
CPUs=$cpus Boards=1 SocketsPerBoard=1 CoresPerSocket=$cpus ThreadsPerCore=1 RealMemory=1000 \
Gres=gpu:$gpus State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
EOF
[ "$cpus" -le "$(nproc)" ] || echo "SlurmdParameters=config_overrides" >> "$SLURM_CONF"
echo "NodeName=n[0-$last] Name=gpu File=$dir/dev/nvidia[0-$((gpus - 1))]" > "$dir/gres.conf"

start() {
    local name=$1
    shift
    setsid nohup "$@" > "$dir/log/$name.out" 2>&1 < /dev/null &
    echo $! > "$dir/pid/$name"
}
until_true() {
    for _ in $(seq 200); do
        "$@" && return
        sleep 0.1
    done
    echo "tinyslurm: not up after 20 s, see $dir/log" >&2
    exit 1
}
controller_up() { scontrol ping 2>/dev/null | grep -q ' UP'; }
nodes_idle() { [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l)" = "$nodes" ]; }

start munged munged -F --force --socket="$dir/munge/socket" --key-file="$dir/munge/key" \
    --pid-file="$dir/munge/pid" --log-file="$dir/munge/log" --seed-file="$dir/munge/seed"
until_true test -S "$dir/munge/socket"
start slurmctld slurmctld -D
until_true controller_up
for i in $(seq 0 $last); do start "n$i" slurmd -D -N "n$i"; done
until_true nodes_idle
