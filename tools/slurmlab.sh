#!/usr/bin/env bash
# A real Slurm cluster of several nodes on this one machine, for tests: Debian's packages, no systemd, nothing left behind.
#
#   slurmlab.sh up                start it; running already: a fresh one
#   slurmlab.sh down              end it and remove its state
#   slurmlab.sh status            nodes and jobs
#   slurmlab.sh env               print the line that points Slurm's commands to it: eval "$(slurmlab.sh env)"
#   slurmlab.sh packages          print the Debian packages it needs
#   slurmlab.sh exec NODE CMD...  run a command as on a node (MODE=netns)
#   slurmlab.sh kill-node NODE    power loss: the node's daemon, steps and tasks
#   slurmlab.sh kill-slurmd NODE  the node's daemon alone
#   slurmlab.sh start-node NODE   bring the node back
#   slurmlab.sh cut NODE          cut the node's network (MODE=netns); heal NODE mends it
#   slurmlab.sh processes NODE    print the ids of the node's processes: its daemon, steps and tasks with all that they started
#
# Jobs of the partition urgent take the nodes of those of main (the default): these are sent SIGTERM and have main's GraceTime
# until they are put into the queue again. Another way to do that: scontrol update PartitionName=main GraceTime=5
# PreemptMode=CANCEL. In MODE=netns a node has its own /dev/shm as well, which is gone with its last process.
#
# Settings, from the environment:
#   LAB_ID  1 ... 254  keeps clusters apart: ports and the network 10.77.<LAB_ID>.0/24 (default 1)
#   LAB                folder for configuration, logs and spool (default $TMPDIR/prl-slurmlab-<LAB_ID>)
#   NODES CPUS MEM     nodes n1, n2, ...; CPUs and MB of memory that each claims, whatever the machine has (default 4 4 20000)
#   GPUS               fake accelerators a node: devices without anything behind them (default 0)
#   ACCT               1: with accounting (slurmdbd and MariaDB), so that sacct works; 0: without (default 1)
#   MODE               netns: every node has its own network, address and host name (root only); flat: all share this
#                      machine's (default netns where it works)
set -uo pipefail
export PATH=$PATH:/usr/sbin:/sbin

LAB_ID=${LAB_ID:-1}
LAB=${LAB:-${TMPDIR:-/tmp}/prl-slurmlab-$LAB_ID}
NODES=${NODES:-4} CPUS=${CPUS:-4} MEM=${MEM:-20000} GPUS=${GPUS:-0} ACCT=${ACCT:-1}
USER_NAME=$(id -un) HOST=$(hostname -s)
export SLURM_CONF=$LAB/etc/slurm.conf

NETWORK=10.77.$LAB_ID BRIDGE=slbr$LAB_ID
BASE_PORT=$((20000 + LAB_ID * 100))
CONTROLLER_PORT=$((BASE_PORT + 1)) ACCOUNTING_PORT=$((BASE_PORT + 2)) DATABASE_PORT=$((BASE_PORT + 3)) NODE_PORT=$((BASE_PORT + 10))
# In memory where possible: the daemons sync every change, which halves the speed of a throw-away cluster.
if [ -w /dev/shm ]; then STATE=/dev/shm/prl-slurmlab-$LAB_ID-$(id -u); else STATE=$LAB/state; fi

die() { echo "slurmlab: error: $*" >&2; exit 1; }
nodes() { local k; for k in $(seq 1 "$NODES"); do echo "n$k"; done; }
namespace() { echo "slab$LAB_ID-$1"; }

# `kill -0` also says yes to a zombie that nobody has reaped yet.
running() { local state; state=$(ps -o stat= -p "$1" 2>/dev/null) && [ -n "$state" ] && [[ $state != Z* ]]; }
pid_in() { cat "$1" 2>/dev/null; }

wait_for() { # SECONDS WHAT COMMAND...
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -ge $end ] && die "waited in vain for $what; the logs are in $LAB/log"
    sleep 0.1
  done
}

choose_mode() {
  [ -n "${MODE:-}" ] && return
  MODE=flat
  [ "$(id -u)" = 0 ] && command -v ip nsenter unshare >/dev/null || return 0
  # Containers without the right to make networks exist.
  ip netns add "$(namespace probe)" 2>/dev/null && ip netns del "$(namespace probe)" && MODE=netns
  return 0
}

packages() {
  echo "slurmctld slurmd slurm-client munge iproute2 procps util-linux"
  [ "$ACCT" = 1 ] && echo "slurmdbd mariadb-server"
  return 0
}

check_programs() {
  local missing="" program
  for program in slurmctld slurmd sinfo srun munged ps; do command -v $program >/dev/null || missing+=" $program"; done
  [ "$MODE" = netns ] && for program in ip nsenter unshare; do command -v $program >/dev/null || missing+=" $program"; done
  [ "$ACCT" = 1 ] && for program in slurmdbd mariadbd mariadb sacctmgr; do command -v $program >/dev/null || missing+=" $program"; done
  [ -z "$missing" ] || die "no such program:$missing; as root: apt-get install -y --no-install-recommends $(packages | tr '\n' ' ')"
}

# ---- configuration

write_configuration() {
  mkdir -p "$LAB"/{etc,run,log,spool,dev} "$STATE"/{controller,mysql}
  chmod 755 "$LAB" "$LAB"/{etc,run,log,spool}
  [ -f "$LAB/etc/munge.key" ] || (umask 077 && head -c 128 /dev/urandom > "$LAB/etc/munge.key")
  write_slurm_conf > "$LAB/etc/slurm.conf"
  write_gres_conf > "$LAB/etc/gres.conf"
  # Unused, but Slurm's search for the version fails where no cgroup is mounted.
  printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n' > "$LAB/etc/cgroup.conf"
  [ "$ACCT" = 1 ] && (umask 077 && write_slurmdbd_conf > "$LAB/etc/slurmdbd.conf")
  return 0
}

write_slurm_conf() {
  local controller=127.0.0.1 k gres=""
  [ "$MODE" = netns ] && controller=$NETWORK.254
  [ "$GPUS" -gt 0 ] && gres=" Gres=gpu:$GPUS"
  cat <<CONF
ClusterName=lab$LAB_ID
SlurmctldHost=$HOST($controller)
SlurmctldPort=$CONTROLLER_PORT
SlurmUser=$USER_NAME
SlurmdUser=$USER_NAME
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job is held off (usually 120 s)
AuthInfo=socket=$LAB/run/munge.sock,cred_expire=5
StateSaveLocation=$STATE/controller
SlurmdSpoolDir=$LAB/spool/%n
SlurmctldPidFile=$LAB/run/slurmctld.pid
SlurmdPidFile=$LAB/run/slurmd.%n.pid
SlurmctldLogFile=$LAB/log/slurmctld.log
SlurmdLogFile=$LAB/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
PropagateResourceLimits=NONE
# nodes may claim more than the machine has
SlurmdParameters=config_overrides
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=10
# Heterogeneous jobs start in the backfill scheduler alone: bf_interval (usually 30 s) is how long they wait.
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_continue,bf_yield_interval=1000000,sched_interval=1,sched_min_interval=0,batch_sched_delay=0,max_rpc_cnt=0
PriorityType=priority/basic
# a job of a partition of a higher PriorityTier may have the nodes of those below it
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
EpilogMsgTime=0
CompleteWait=0
KillWait=15
MinJobAge=600
# how fast lost nodes are noticed (usually 300 s and 10 s)
SlurmdTimeout=15
SlurmctldTimeout=30
MessageTimeout=10
TCPTimeout=2
InactiveLimit=0
BatchStartTimeout=20
JobRequeue=1
GresTypes=gpu
CONF
  if [ "$ACCT" = 1 ]; then
    cat <<CONF
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$controller
AccountingStoragePort=$ACCOUNTING_PORT
AccountingStoragePass=$LAB/run/munge.sock
AccountingStorageTRES=gres/gpu
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
CONF
  else
    echo "AccountingStorageType=accounting_storage/none"
  fi
  for k in $(seq 1 "$NODES"); do
    local claims="CPUs=$CPUS RealMemory=$MEM$gres"
    if [ "$MODE" = netns ]; then echo "NodeName=n$k NodeHostname=n$k NodeAddr=$NETWORK.$k Port=$NODE_PORT $claims"
    else echo "NodeName=n$k NodeHostname=$HOST NodeAddr=127.0.0.1 Port=$((NODE_PORT + k)) $claims"; fi
  done
  echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP OverSubscribe=NO PriorityTier=1 GraceTime=20"
  echo "PartitionName=urgent Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP OverSubscribe=NO PriorityTier=2"
}

write_gres_conf() { # fake accelerators must be character devices, or the nodes stay invalid
  [ "$GPUS" -gt 0 ] || return 0
  local k
  if [ "$(id -u)" = 0 ]; then
    for k in $(seq 0 $((GPUS - 1))); do
      [ -c "$LAB/dev/gpu$k" ] || mknod -m 666 "$LAB/dev/gpu$k" c 1 3 || die "cannot make the device $LAB/dev/gpu$k; use GPUS=0"
    done
    echo "Name=gpu File=$LAB/dev/gpu[0-$((GPUS - 1))]"
  else
    echo "Name=gpu File=/dev/tty[1-$GPUS]" # devices that exist for everybody
  fi
}

write_slurmdbd_conf() {
  local address=127.0.0.1
  [ "$MODE" = netns ] && address=$NETWORK.254 # which the nodes reach, too: sacct is asked there as well
  cat <<CONF
AuthType=auth/munge
AuthInfo=socket=$LAB/run/munge.sock
DbdHost=localhost
DbdAddr=$address
DbdPort=$ACCOUNTING_PORT
SlurmUser=$USER_NAME
PidFile=$LAB/run/slurmdbd.pid
LogFile=$LAB/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$DATABASE_PORT
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
CONF
}

# ---- networks and nodes

start_networks() {
  [ "$MODE" = netns ] || return 0
  local k ns veth
  ip link show "$BRIDGE" >/dev/null 2>&1 || ip link add "$BRIDGE" type bridge || die "cannot make a bridge; try MODE=flat"
  ip addr replace "$NETWORK.254/24" dev "$BRIDGE" && ip link set "$BRIDGE" up || die "cannot set up $BRIDGE; try MODE=flat"
  { printf '127.0.0.1 localhost\n%s %s\n' "$NETWORK.254" "$HOST"
    for k in $(seq 1 "$NODES"); do echo "$NETWORK.$k n$k"; done; } > "$LAB/etc/hosts"
  for k in $(seq 1 "$NODES"); do
    ns=$(namespace "n$k") veth=v$LAB_ID-n$k
    ip netns add "$ns" 2>/dev/null
    ip link show "$veth" >/dev/null 2>&1 || ip link add "$veth" type veth peer name eth0 netns "$ns" || die "no network for n$k; try MODE=flat"
    ip link set "$veth" master "$BRIDGE" up
    ip -n "$ns" addr replace "$NETWORK.$k/24" dev eth0
    ip -n "$ns" link set eth0 up
    ip -n "$ns" link set lo up
  done
}

in_node() { # NODE COMMAND...: with the node's network, host name, /etc/hosts and /dev/shm
  local node=$1 shm='mount -t tmpfs -o mode=1777 shm /dev/shm &&'
  shift
  [[ $LAB/ != /dev/shm/* ]] || shm='' # what all nodes share lies there
  # Not `ip netns exec`: its new /sys hides /sys/fs/cgroup, without which slurmd dies.
  nsenter --net="/run/netns/$(namespace "$node")" unshare --uts --mount --propagation slave -- \
    sh -c 'hostname "$0" && mount --bind "$1" /etc/hosts && '"$shm"' shift && exec "$@"' "$node" "$LAB/etc/hosts" "$@"
}

start_node() {
  local pid
  pid=$(pid_in "$LAB/run/slurmd.$1.pid") && running "$pid" && return 0
  mkdir -p "$LAB/spool/$1"
  rm -f "$LAB/run/slurmd.$1.pid"
  if [ "$MODE" = netns ]; then in_node "$1" slurmd -f "$SLURM_CONF" -N "$1"; else slurmd -f "$SLURM_CONF" -N "$1"; fi
}

node_pids() { # every process of a node: daemon, steps, tasks and what they started
  if [ "$MODE" = netns ]; then
    ip netns pids "$(namespace "$1")" 2>/dev/null
  else
    local proc environment
    for proc in /proc/[0-9]*; do
      environment=$({ tr '\0' '\n' < "$proc/environ"; } 2>/dev/null) || continue # ended meanwhile, or somebody else's
      grep -qx "SLURMD_NODENAME=$1" <<<"$environment" && grep -qx "SLURM_CONF=$SLURM_CONF" <<<"$environment" && echo "${proc#/proc/}"
    done
    pid_in "$LAB/run/slurmd.$1.pid"
  fi
}

# All at once, as it is when the power goes: whoever saw others die could still say so, or start something. So they are stopped
# before, until there is nobody new, and killed children first: the kernel wakes who is stopped and has lost its parent.
kill_node() {
  local pids='' found
  while found=$(node_pids "$1"); [ "$found" != "$pids" ]; do
    pids=$found
    [ -z "$pids" ] || kill -STOP $pids 2>/dev/null # one word a process
  done
  [ -z "$pids" ] || kill -9 $(sort -rn <<<"$pids") 2>/dev/null
  return 0
}

# ---- daemons

start_accounting() {
  [ "$ACCT" = 1 ] || return 0
  local socket=$LAB/run/mysql.sock client
  client="mariadb --no-defaults -S $socket -u root -e"
  mariadb-install-db --no-defaults --datadir="$STATE/mysql" --user="$USER_NAME" --auth-root-authentication-method=normal \
    --skip-test-db --skip-name-resolve > "$LAB/log/mariadb-install.log" 2>&1 || die "no database: see $LAB/log/mariadb-install.log"
  setsid mariadbd --no-defaults --datadir="$STATE/mysql" --user="$USER_NAME" --bind-address=127.0.0.1 --port=$DATABASE_PORT \
    --socket="$socket" --pid-file="$LAB/run/mariadb.pid" --skip-name-resolve --innodb-buffer-pool-size=64M \
    --innodb-log-file-size=16M --innodb-flush-log-at-trx-commit=0 --innodb-use-native-aio=0 --innodb-lock-wait-timeout=900 \
    --log-error="$LAB/log/mariadb.log" </dev/null >/dev/null 2>&1 &
  wait_for 60 "MariaDB" $client 'select 1'
  $client "create database slurm_acct; create user slurm@'127.0.0.1' identified by 'slurm'; create user slurm@localhost identified by 'slurm';
    grant all on slurm_acct.* to slurm@'127.0.0.1'; grant all on slurm_acct.* to slurm@localhost;" || die "the database refused Slurm's user"
  slurmdbd || die "slurmdbd did not start: see $LAB/log/slurmdbd.log"
  wait_for 60 "slurmdbd" sacctmgr -n -i list cluster
  sacctmgr -i -Q add cluster "lab$LAB_ID" >/dev/null || die "slurmdbd refused the cluster: see $LAB/log/slurmdbd.log"
}

start_controller() {
  slurmctld -f "$SLURM_CONF" || die "slurmctld did not start: see $LAB/log/slurmctld.log"
  wait_for 30 "slurmctld" sh -c 'scontrol ping | grep -q " UP"'
}

all_idle() { [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l)" = "$NODES" ]; }

up() {
  local began=$SECONDS node
  check_programs
  stop_all
  write_configuration
  munged --force --key-file="$LAB/etc/munge.key" --socket="$LAB/run/munge.sock" --pid-file="$LAB/run/munged.pid" \
    --log-file="$LAB/log/munged.log" --seed-file="$LAB/etc/munge.seed" 2> "$LAB/log/munged.err" || die "munged: $(cat "$LAB/log/munged.err")"
  start_networks
  start_accounting
  start_controller
  for node in $(nodes); do start_node "$node" || die "slurmd on $node did not start: see $LAB/log"; done
  wait_for 60 "$NODES idle nodes" all_idle
  echo "slurmlab: $NODES nodes ($MODE) idle after $((SECONDS - began)) s; export SLURM_CONF=$SLURM_CONF"
}

stop_daemon() { # PIDFILE SIGNAL
  local pid k
  pid=$(pid_in "$1")
  if [ -n "$pid" ] && running "$pid"; then
    kill "-$2" "$pid" 2>/dev/null
    for k in $(seq 100); do running "$pid" || break; sleep 0.05; done
    running "$pid" && kill -9 "$pid" 2>/dev/null
  fi
  rm -f "$1"
}

stop_all() { # KILL and not TERM: there is no state worth saving
  [ -d "$LAB/run" ] || return 0
  local file node ns
  stop_daemon "$LAB/run/slurmctld.pid" KILL
  for file in "$LAB"/run/slurmd.*.pid; do
    [ -e "$file" ] || continue
    node=${file##*/slurmd.}
    kill_node "${node%.pid}"
    rm -f "$file"
  done
  if command -v ip >/dev/null && [ "$MODE" = netns ]; then
    for ns in $(ip netns list 2>/dev/null | awk -v prefix="slab$LAB_ID-" 'index($1, prefix) == 1 { print $1 }'); do
      kill_node "${ns#"slab$LAB_ID-"}"
      ip netns del "$ns"
    done
    ip link del "$BRIDGE" 2>/dev/null
  fi
  stop_daemon "$LAB/run/slurmdbd.pid" KILL
  stop_daemon "$LAB/run/mariadb.pid" KILL
  stop_daemon "$LAB/run/munged.pid" TERM
  rm -rf "$LAB"/run/*.sock "$LAB"/run/*.sock.lock "$LAB/spool" "$STATE"
}

choose_mode
case ${1:-} in
  up) up ;;
  down) stop_all && echo "slurmlab: down" ;;
  status) sinfo -N -o '%N %T %c %m %G %E' && squeue ;;
  env) echo "export SLURM_CONF=$SLURM_CONF PRL_LAB_MODE=$MODE" ;;
  packages) packages ;;
  exec) shift && in_node "$@" ;;
  kill-node) kill_node "$2" ;;
  kill-slurmd) kill -9 "$(pid_in "$LAB/run/slurmd.$2.pid")" ;;
  start-node) start_node "$2" ;;
  cut) ip link set "v$LAB_ID-$2" down ;;
  heal) ip link set "v$LAB_ID-$2" up ;;
  processes) node_pids "$2" ;;
  -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0" ;;
  *) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
esac
