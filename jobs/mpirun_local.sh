#!/usr/bin/env bash
# Any of the jobs on this machine, without a scheduler; a file of a cache is decoded.
# usage: jobs/mpirun_local.sh RANKS (CACHE.safetensors | jobs/NAME.sbatch) [--dry-run] [what that job takes]
set -euo pipefail
if [ $# -lt 2 ]; then
  sed -n 's/^# usage: /usage: /p' "$0" >&2
  exit 2
fi
export TREEATTN_SITE=local TREEATTN_RANKS=$1
shift
case $1 in
  *.sbatch) exec bash "$@" ;;
  *) exec bash "$(dirname "$0")/decode.sbatch" "$@" ;;
esac
