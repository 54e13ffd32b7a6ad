# shellcheck shell=bash
# What every job script shares; sourced, never run. A script calls, in this order:
#
#   begin NAME LEAST "$@"             in jobs/NAME.sbatch: reads --dry-run; chooses the site; makes the run folder, or
#                                     finds that of a job that was requeued; leaves the other words, LEAST or more, in `words`
#   on_ranks N COMMAND WORD...        `treeattn COMMAND WORD...` on N ranks; `$ranks` are all of the job
#   with_cache_nodes PROGRAM WORD...  `PROGRAM WORD...` as rank 0, `treeattn cache-node` as all others
#   finish                            marks the run as done
#
# The run folder holds `command`, `environment`, `log`, `status` (running, done, cut off, failed), and results.
# Variables: TREEATTN_SITE (a file of jobs/sites/, default slurm in a job of Slurm, else local), TREEATTN_RUNS (where
# run folders are made, default runs/), TREEATTN_RUN (the folder itself: to go on in a new job), TREEATTN_RANKS (where
# no scheduler says it), TREEATTN_RESTARTS (how often a job puts itself back into the queue, default 10).
set -euo pipefail

say() { printf '%s: %s\n' "${name:-treeattn}" "$*" >&2; }

# Bad arguments and what cannot work: a line that says what to do, and exit code 2.
refuse() {
  say "$*"
  exit 2
}

# The line of usage that each script carries.
usage() {
  sed -n 's/^# usage: /usage: /p' "$0" >&2
  exit 2
}

begin() {
  name=$1
  local least=$2
  shift 2
  dry_run=
  words=()
  local word
  for word; do
    if [ "$word" = --dry-run ]; then dry_run=yes; else words+=("$word"); fi
  done
  [ ${#words[@]} -ge "$least" ] || usage
  running=
  stopped=
  choose_site
  find_sizes
  choose_run
  if [ -n "$dry_run" ]; then
    say "$ranks ranks on $nodes nodes; would be in $run:"
  else
    open_run
  fi
}

# Sets LAUNCHER, LAUNCH_OPTIONS and what else the site knows.
choose_site() {
  local site=${TREEATTN_SITE:-local}
  [ -z "${SLURM_JOB_ID:-}" ] || site=${TREEATTN_SITE:-slurm}
  # shellcheck disable=SC2154 # every script sets it
  local file=$jobs/sites/$site.sh
  [ -r "$file" ] || refuse "there is no site $site: copy $jobs/sites/EXAMPLE.sh to $file and edit it"
  LAUNCHER=
  LAUNCH_OPTIONS=()
  set +u # what a site loads, modules and environments, is seldom written for it
  # shellcheck source=/dev/null
  . "$file"
  set -u
  command -v treeattn > /dev/null || PATH=$(cd "$jobs/.." && pwd)/.venv/bin:$PATH
  command -v treeattn > /dev/null || [ -n "$dry_run" ] ||
    refuse "treeattn is not on the path: activate its environment in $file"
  case $LAUNCHER in
    srun) [ -n "${SLURM_JOB_ID:-}$dry_run" ] ||
      refuse "this is no job of Slurm: sbatch jobs/$name.sbatch ..., or TREEATTN_SITE=local to run on this machine" ;;
    mpirun) ;;
    *) refuse "$file: LAUNCHER is '$LAUNCHER', not srun or mpirun" ;;
  esac
}

# Sets `ranks` and `nodes`: what this job was given, which may be less than what was asked for.
find_sizes() {
  ranks=${TREEATTN_RANKS:-}
  nodes=1
  if [ -n "${SLURM_JOB_ID:-}" ]; then
    # SLURM_NTASKS is what the least number of nodes would have.
    ranks=$(tasks_on_nodes "${SLURM_TASKS_PER_NODE:?Slurm did not say how many tasks there are}")
    nodes=${SLURM_JOB_NUM_NODES:?Slurm did not say how many nodes there are}
  elif [ -z "$ranks" ] && [ -n "$dry_run" ]; then
    nodes=$(asked nodes)
    ranks=$((nodes * $(asked ntasks-per-node)))
  fi
  [[ $ranks =~ ^[1-9][0-9]*$ ]] || refuse "'$ranks' is no number of ranks: jobs/mpirun_local.sh RANKS $0, or sbatch"
}

# What the script itself asks of Slurm.
asked() { sed -n "s/^#SBATCH --$1=\\([0-9]*\\).*/\\1/p" "$0"; }

# 2(x3),1 -> 7, as Slurm writes tasks of nodes
tasks_on_nodes() {
  local sum=0 part
  local -a parts
  IFS=, read -ra parts <<< "$1"
  for part in "${parts[@]}"; do
    [[ $part =~ ^([0-9]+)(\(x([0-9]+)\))?$ ]] || refuse "SLURM_TASKS_PER_NODE is '$1', which is not understood"
    sum=$((sum + BASH_REMATCH[1] * ${BASH_REMATCH[3]:-1}))
  done
  echo "$sum"
}

# The same folder for a job each time that it is requeued, another for every job. Also sets `job`, as Slurm's programs
# take it: 6_1 for a task of an array, where the SLURM_JOB_ID of one task is 6 too, which stands for all of them.
choose_run() {
  job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
  job=${job:-${SLURM_JOB_ID:-}}
  run=${TREEATTN_RUN:-${TREEATTN_RUNS:-runs}/$name-${job:-$(date +%Y%m%dT%H%M%S)-$$}}
}

open_run() {
  mkdir -p "$run" || refuse "$run: no folder can be made there; set TREEATTN_RUNS"
  export TERM=dumb # Open MPI's launcher gives ranks a terminal, and this is a file
  exec 3>&2
  # A signal to all processes of the job must not end the one that writes down what they say.
  exec > >(trap '' TERM INT && exec tee -a "$run/log") 2>&1
  log_writer=$!
  trap ended EXIT
  trap cut_off TERM
  trap 'exit 130' INT
  { describe >> "$run/environment" && printf '%q ' "jobs/$name.sbatch" "${words[@]}" >> "$run/command" &&
    echo >> "$run/command" && mark running; } || refuse "$run: cannot be written; make room, or set TREEATTN_RUNS"
  say "$ranks ranks on $nodes nodes, in $run${SLURM_RESTART_COUNT:+, started again: $SLURM_RESTART_COUNT}"
}

mark() { echo "$1" > "$run/status"; }

# What can change a result; other variables may hold secrets.
describe() {
  echo "== $(date -u +%Y-%m-%dT%H:%M:%SZ) on $(hostname), site ${TREEATTN_SITE:-default}, launcher $LAUNCHER"
  echo "$ranks ranks, $nodes nodes ${SLURM_JOB_NODELIST:-}, modules ${LOADEDMODULES:-none}"
  treeattn --version
  env | grep -E '^(SLURM_(JOB|STEP|ARRAY|NTASKS|TASKS|CPUS|GPUS|MPI|RESTART)|TREEATTN_|OMPI_MCA_|PRTE_MCA_|MPICH_|MPIR_|UCX_|FI_|NCCL_|OMP_|CUDA_VISIBLE)' |
    sort || true
}

# treeattn on so many ranks. A signal that arrives meanwhile is handled at once; this returns what treeattn did.
on_ranks() {
  local count=$1
  shift
  [[ $count =~ ^[1-9][0-9]*$ ]] && [ "$count" -le "$ranks" ] ||
    refuse "$count ranks are wanted and this job has $ranks on $nodes nodes: ask for more with sbatch --nodes"
  local -a command
  launch_command "$count" treeattn "$@"
  launch
}

# The model process and its cache nodes, as two programs of one job.
with_cache_nodes() {
  [ "$ranks" -gt 1 ] || refuse "one rank is a model process without cache nodes: ask for more with sbatch --nodes"
  local -a command
  case $LAUNCHER in
    srun)
      launch_command "$ranks" --multi-prog "$run/programs"
      if [ -z "$dry_run" ]; then # a file for its words, which Slurm would read in its own way
        printf 'exec%s\n' "$(printf ' %q' "$@")" > "$run/model"
        printf '%s\n' "0 bash $run/model" "1-$((ranks - 1)) treeattn cache-node" > "$run/programs"
      fi
      ;;
    mpirun)
      launch_command 1 "$@"
      command+=(: "${LAUNCH_OPTIONS[@]}" -n $((ranks - 1)) treeattn cache-node)
      ;;
  esac
  launch
}

# Runs `command`, or shows it.
launch() {
  local status=0
  if [ -n "$dry_run" ]; then
    printf '%q ' "${command[@]}"
    echo
    return
  fi
  printf '+%s\n' "$(printf ' %q' "${command[@]}")" >&2
  [ -z "$stopped" ] || go_on_later
  "${command[@]}" &
  running=$!
  wait "$running" || status=$?
  while kill -0 "$running" 2> /dev/null; do # a trapped signal ends `wait`, not the command
    status=0
    wait "$running" || status=$?
  done
  running=
  [ -z "$stopped" ] || [ "$status" = 0 ] || go_on_later
  [ "$status" = 0 ] || exit "$status"
}

# Sets `command`. One rank that fails ends the others, and a rank that never ends holds the job no longer than a minute.
launch_command() {
  local count=$1
  shift
  case $LAUNCHER in
    srun)
      local each=$(((ranks + nodes - 1) / nodes))
      local used=$(((count + each - 1) / each))
      command=(srun --kill-on-bad-exit=1 --wait=60 --nodes="$used" --ntasks="$count")
      # sbatch's word on it does not reach srun by itself.
      [ -z "${SLURM_CPUS_PER_TASK:-}" ] || command+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
      command+=("${LAUNCH_OPTIONS[@]}" "$@")
      ;;
    mpirun) command=("${MPIEXEC:-mpiexec}" "${LAUNCH_OPTIONS[@]}" -n "$count" "$@") ;;
  esac
}

# SIGTERM: the time limit is near. treeattn ends by itself, with all that it has measured on disk. srun would kill
# its tasks if it got the signal; Slurm passes it on to them. The tasks hear it first: SIGKILL may follow.
cut_off() {
  stopped=yes
  mark 'cut off' || true
  say "SIGTERM: the time limit is near, or somebody ends this"
  case ${running:+$LAUNCHER} in
    srun) scancel --signal=TERM "$job" || true ;; # a job that somebody cancels has had it already
    mpirun) kill -TERM "$running" || true ;;      # it may just have ended
  esac
  [ -n "$job" ] || return 0
  local state
  state=$(state_of_job)
  # SIGNALING: it runs, and Slurm has not yet heard from its nodes that the warning reached them.
  if [[ ! $state =~ ^(RUNNING|SIGNALING|)$ ]]; then
    stopped='by Slurm'
    say "ended by Slurm: unless Slurm starts it again, TREEATTN_RUN=$run and the same sbatch go on from there ($state)"
  fi
}

# What Slurm says of the job. One that is too busy is asked again, for 20 s at most of the minute that a time limit
# leaves; nothing: it never answered, and the job goes back into the queue as at its time limit.
state_of_job() {
  local state
  for _ in 1 2 3 4 5; do
    state=$(timeout 3 squeue --noheader --jobs="$job" --format=%T) && [ -n "$state" ] && break
    sleep 1
  done
  echo "$state"
}

# Back into the queue, where there is one: the same script finds the same folder and goes on from there.
go_on_later() {
  trap '' TERM
  [ "$stopped" = yes ] || exit 143
  if [ -z "$job" ]; then
    say "cut off: TREEATTN_RUN=$run and the same command go on from there"
  elif [ "${SLURM_RESTART_COUNT:-0}" -ge "${TREEATTN_RESTARTS:-10}" ]; then
    say "cut off, and started again $SLURM_RESTART_COUNT times already: a longer --time, with TREEATTN_RUN=$run"
  elif scontrol requeue "$job"; then
    say "cut off and requeued: it goes on in $run"
  else
    say "cut off, and Slurm does not requeue it: submit it again with TREEATTN_RUN=$run"
  fi
  exit 143
}

# Whether an earlier start of this job has made a file that is written whole or not at all.
already() {
  [ -z "$dry_run" ] && [ -s "$1" ] && say "$1 is there already: nothing is left to do"
}

# The element of a list that is this task of a job array: `task=$(element 64Ki,256Ki,1Mi)`.
element() {
  local -a list
  IFS=, read -ra list <<< "$1"
  local task=${SLURM_ARRAY_TASK_ID:-}
  [ -n "$task" ] || refuse "this is one task of an array: sbatch it, or set SLURM_ARRAY_TASK_ID (from 0)"
  [ "$task" -lt "${#list[@]}" ] || refuse "task $task of the array has no element in $1: sbatch --array=0-$((${#list[@]} - 1))"
  echo "${list[$task]}"
}

finish() { [ -n "$dry_run" ] || mark "done"; }

# Whatever ends the script: the status says how, and the log is whole before it is gone.
ended() {
  local code=$?
  if [ "$code" != 0 ] && [ -z "$stopped" ]; then
    mark "failed $code" || true
    say "failed with exit code $code; what is finished is kept in $run"
  fi
  exec >&3 2>&3
  wait "$log_writer" || true
  exit "$code"
}
