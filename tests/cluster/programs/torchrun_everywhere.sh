#!/bin/bash
# torchrun on two emulated nodes, two ranks each: torchrun_everywhere.sh PYTHON PROGRAM
launch() {
  /dev/shm/cluster/remote_shell "node$1" env OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0 PYTHONPATH="$PYTHONPATH" "${@:2}"
}
common=(-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --master-addr node0 --master-port 29511)
launch 1 "$1" "${common[@]}" --node-rank 1 "$2" &
launch 0 "$1" "${common[@]}" --node-rank 0 "$2" && wait $!
