#!/usr/bin/env bash
# Debian's Slurm and what the emulated cluster needs: installed where something is absent and this is root.
set -euo pipefail
packages="slurmctld slurmd slurm-client munge libpmix-dev iproute2 util-linux"
absent=
for program in slurmctld slurmd srun munged ip tc nsenter; do
  command -v "$program" > /dev/null || absent="$absent $program"
done
# Debian's plug-in for PMIx opens the library by the name that only the -dev package has.
compgen -G '/usr/lib/*/pmix2/lib/libpmix.so' > /dev/null || absent="$absent libpmix.so"
[ -n "$absent" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "slurm-test: not here:$absent; as root, on Debian 12, run: apt-get install -y --no-install-recommends $packages" >&2
  exit 1
fi
apt-get update -q
# shellcheck disable=SC2086 # these are words
DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $packages
