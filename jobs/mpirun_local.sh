#!/usr/bin/env bash
# Decode one cache on this machine: jobs/mpirun_local.sh RANKS CACHE.safetensors [options of treeattn decode]
set -euo pipefail
if [ $# -lt 2 ]; then
  sed -n '2s/^# /usage: /p' "$0" >&2
  exit 2
fi
ranks=$1
cache=$2
shift 2
bin=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin
[ -x "$bin/treeattn" ] && PATH=$bin:$PATH
exec "${MPIEXEC:-mpiexec}" -n "$ranks" treeattn decode "$cache" --check --json "decode-$(date +%Y%m%dT%H%M%S).json" "$@"
