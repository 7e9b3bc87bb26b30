#!/usr/bin/env bash
# From nothing to a trained model: makes .venv, then trains the digits task of configs/quickstart.yaml on this machine.
#   bash tools/quickstart.sh [options of prl-submit, e.g. --set run.seed=2]
# Every call trains in a new run folder (runs/quickstart, runs/quickstart-2, ...). Needs Python 3.11 and about 4 GB of disk.
set -euo pipefail
script=$(realpath "$0")
cd "$(dirname "$script")/.."
case ${1:-} in -h | --help) sed -n '2,4s/^# \{0,1\}//p' "$script"; exit 0 ;; esac

bash tools/setup.sh

folder=runs/quickstart
number=1
while [ -e "$folder" ]; do
  number=$((number + 1))
  folder=runs/quickstart-$number
done

for arg in "$@"; do
  case $arg in run.folder=* | --set=run.folder=*) folder=${arg#*run.folder=} ;; esac
done

echo "quickstart: training into $folder (Ctrl-C ends the run in order)"
code=0
.venv/bin/prl-submit configs/quickstart.yaml --set "run.folder=$folder" "$@" || code=$?
if [ -d "$folder" ]; then
  echo
  .venv/bin/prl-report "$folder"
fi
if [ $code != 0 ]; then
  echo "quickstart: error: prl-submit ended with exit code $code; its words are above, logs are in $folder/latest/logs" >&2
fi
exit $code
