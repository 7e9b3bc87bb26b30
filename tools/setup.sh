#!/usr/bin/env bash
# Makes .venv with everything prl needs to run on a machine without a GPU; a second call reuses it.
#   bash tools/setup.sh          what a run needs (torch, vLLM's CPU build, Megatron-core, submitit, ...)
#   bash tools/setup.sh --dev    and what the tests need (ruff, mypy, hypothesis, math-verify, ...)
# PYTHON names the interpreter (default: the first python3.11 that works). On GPUs use `pip install '.[gpu]'` instead.
set -euo pipefail
script=$(realpath "$0")
cd "$(dirname "$script")/.."
locks=tools/requirements
venv=.venv
want_dev=0
for arg in "$@"; do
  case $arg in
    --dev) want_dev=1 ;;
    -h | --help) sed -n '2,5s/^# \{0,1\}//p' "$script"; exit 0 ;;
    *) echo "setup: unknown option '$arg' (see --help)" >&2; exit 2 ;;
  esac
done

say() { echo "setup: $*"; }
die() { echo "setup: error: $*" >&2; exit 1; }
pip_install() { "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps "$@"; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 /usr/bin/python3.11 python3}; do
    "$candidate" -c 'import sys; raise SystemExit(sys.version_info[:2] != (3, 11))' 2>/dev/null && { command -v "$candidate"; return; }
  done
  die "no Python 3.11 found. The CPU set is pinned for 3.11: install it (Debian: apt-get install python3.11 python3.11-venv) or name it with PYTHON=/path/to/python3.11"
}

make_venv() {
  local python=$1
  "$python" -m venv "$venv" >/tmp/prl-venv.$$ 2>&1 && { rm -f /tmp/prl-venv.$$; return; }
  cat /tmp/prl-venv.$$ >&2
  rm -rf "$venv" /tmp/prl-venv.$$
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing python3.11-venv with apt"
    apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends python3.11-venv >/dev/null
    "$python" -m venv "$venv"
  else
    die "'$python -m venv' failed. On Debian or Ubuntu: apt-get install python3.11-venv"
  fi
}

install_torch() {
  local pin
  pin=$(grep '^torch==' $locks/cpu.lock)
  pip_install "$pin" 2>/dev/null && return
  # The CPU build is not on PyPI; only this line may see PyTorch's own index.
  pip_install "$pin" --extra-index-url https://download.pytorch.org/whl/cpu --retries 0 --timeout 15 ||
    die "could not install $pin: it needs PyTorch's CPU wheel index, or a wheel in a folder named by PIP_FIND_LINKS"
}

# A stamp says what was installed, so that an interrupted or outdated set-up is done again and a good one is not.
done_already() { [ -f "$venv/$1" ] && [ "$(cat "$venv/$1")" = "$2" ]; }
base_stamp=$(cat $locks/cpu.lock $locks/megatron.lock $locks/build.lock setup.cfg "$script" | sha256sum)
dev_stamp=$(cat $locks/extras.lock | sha256sum)

if ! done_already prl-base "$base_stamp"; then
  started=$SECONDS
  [ -x "$venv/bin/python" ] && "$venv/bin/python" -c '' 2>/dev/null || { rm -rf "$venv"; make_venv "$(find_python)"; }
  say "installing the CPU set into $venv (about 3.5 GB; 2 to 5 minutes)"
  install_torch
  grep -v '^torch==' $locks/cpu.lock > "$venv/cpu-without-torch.lock"
  pip_install -r "$venv/cpu-without-torch.lock" || die "could not install $locks/cpu.lock"
  # The package declares Python >= 3.12; its cp311 wheel works.
  pip_install --ignore-requires-python -r $locks/megatron.lock || die "could not install $locks/megatron.lock"
  pip_install -r $locks/build.lock && pip_install --no-build-isolation -e . || die "could not install prl itself"
  echo "$base_stamp" > "$venv/prl-base"
  say "done after $((SECONDS - started)) s"
fi
if [ $want_dev = 1 ] && ! done_already prl-dev "$dev_stamp"; then
  say "installing the development extras"
  pip_install -r $locks/extras.lock || die "could not install $locks/extras.lock"
  echo "$dev_stamp" > "$venv/prl-dev"
fi
