#!/usr/bin/env bash
# The tests: ruff, mypy and pytest, with a Slurm cluster of several nodes on this machine where its packages can be had.
#   bash tools/test.sh [pytest's options]           all that is quick (not marked slow)
#   bash tools/test.sh --all [pytest's options]     and the slow suites, one shard (folder of tests/) after another
#   bash tools/test.sh --shard NAME [...]           the slow suites of one folder alone
#   bash tools/test.sh tests/flow [...]             the quick tests there; with --all, all of them
#   bash tools/test.sh --no-slurm [...]             without the cluster; the tests that need it are not run
# Stops at the first step or shard that fails. As root on Debian or Ubuntu it installs Slurm's packages and Redis with apt.
set -euo pipefail
script=$(realpath "$0")
cd "$(dirname "$script")/.."
exec </dev/null
unset SLURM_CONF PRL_LAB_MODE # the tests' jobs go to the lab cluster or nowhere

all=0 shard='' want_slurm=1
say() { echo "test: $*"; }
die() { echo "test: error: $*" >&2; exit 1; }

while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$script"; exit 0 ;;
    --all) all=1; shift ;;
    --shard)
      shard=${2:-}
      [ -n "$shard" ] || die "--shard needs the name of a folder of tests/"
      shift 2
      ;;
    --no-slurm) want_slurm=0; shift ;;
    *) break ;;
  esac
done

slurm_packages=$(bash tools/slurmlab.sh packages | xargs)
slurm_programs=(slurmctld slurmd sbatch slurmdbd munged mariadbd ip)

# The first of Slurm's programs that is not there.
missing_program() {
  local program
  for program in "${slurm_programs[@]}"; do
    PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null || { echo "$program"; return; }
  done
}

install_slurm() {
  [ -z "$(missing_program)" ] && return
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
  say "installing Slurm with apt: $slurm_packages"
  export DEBIAN_FRONTEND=noninteractive
  { apt-get -qq update && apt-get -qq install -y --no-install-recommends $slurm_packages; } >"$log" 2>&1 || {
    tail -20 "$log" >&2
    die "apt could not install Slurm (above). Install $slurm_packages by hand, or leave its tests out with --no-slurm"
  }
}

# Without it, tests against a real Redis server are skipped, each with a line of pytest's summary.
install_redis() {
  command -v redis-server >/dev/null && return
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing redis-server with apt"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends redis-server; } >"$log" 2>&1 && return
    tail -20 "$log" >&2
  fi
  say "tests against a Redis server are skipped: no redis-server here, and apt could not install it"
}

log=$(mktemp)
cluster_up=0
clean_up() {
  [ $cluster_up = 0 ] || bash tools/slurmlab.sh down >"$log" 2>&1 || { echo "test: the lab cluster did not go down:" >&2; cat "$log" >&2; }
  rm -f "$log"
}
trap clean_up EXIT

bash tools/setup.sh --dev
install_redis
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"

say "ruff"
ruff check --config tools/ruff.toml .
ruff format --config tools/ruff.toml --check .
say "mypy"
mypy

if [ $want_slurm = 1 ]; then
  install_slurm
  missing=$(missing_program)
  if [ -z "$missing" ]; then
    say "lab cluster up"
    cluster_up=1 # before `up`: what a failed `up` leaves is taken down, too
    bash tools/slurmlab.sh up >"$log" 2>&1 || { cat "$log" >&2; die "the lab cluster did not come up (above); --no-slurm tests without it"; }
    eval "$(bash tools/slurmlab.sh env)"
    [ "$PRL_LAB_MODE" = netns ] || say "tests marked slurm_netns are not run: nodes get networks of their own only as root, where making them is allowed"
  else
    say "tests marked slurm are not run: no $missing here, and only root with apt can install it"
  fi
else
  say "tests marked slurm are not run, as --no-slurm asks"
fi

# Folders of tests/ with slow tests in them: a shard each.
slow_shards() { grep -rl --include='test_*.py' 'mark\.slow' tests | cut -d/ -f2 | sed 's/\.py$//' | sort -u; }

# pytest's closing lines stay the last. With --all, a shard in which -k selects nothing (exit code 5) is none that failed.
run_pytest() {
  local marks=$1 code=0
  shift
  python -m pytest -m "$marks" --durations=15 "$@" || code=$?
  [ $code = 5 ] && [ $all = 1 ] || return $code
}
shard_path() { [ -d "tests/$1" ] && echo "tests/$1" || echo "tests/$1.py"; }
names_tests() {
  local argument
  for argument in "$@"; do [ -e "${argument%%::*}" ] && return; done
  return 1
}

if names_tests "$@"; then
  if [ $all = 1 ]; then run_pytest '' "$@"; else run_pytest 'not slow' "$@"; fi
elif [ -n "$shard" ]; then
  [ -e "$(shard_path "$shard")" ] || die "no such shard: $shard; there are: $(slow_shards | xargs)"
  run_pytest slow "$(shard_path "$shard")" "$@"
else
  run_pytest 'not slow' tests "$@"
  if [ $all = 1 ]; then
    for shard in $(slow_shards); do
      say "slow shard $shard"
      run_pytest slow "$(shard_path "$shard")" "$@"
    done
  fi
fi
