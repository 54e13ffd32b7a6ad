// Reduces the records of the ranks of a node in one launch. A rank copies what others need into a window of its own
// memory, announces it by a number there, and pulls what it needs out of the others' windows, in the order of a
// schedule (collectives/program.py). Nothing is ever written to another rank's memory. Bits as treeattn/partial.py
// defines them. The launch that ends a step may finish the records too.
//
// A record goes its way alone, so that block b of a rank meets only block b of the others: it needs no barrier over a
// grid, but all blocks of a grid must run at once. There are two sets of slots, for even and for odd steps.
//
// Where ranks are on several nodes a step is several launches, each a part of the program: between them messages of
// other nodes land beside the records.
//
// What takes time is the round trip to another GPU, a microsecond or so. So nothing is asked for behind something else:
// a program that fits lies in the parameters of the launch, where no load goes to memory for it, and a fold has what it
// needs of all its sources under way before it waits for the first (fold.cuh).
#include "finish.cuh"
#include "fold.cuh"

enum Operation { COPY, ANNOUNCE, AWAIT, PULL };

// About records first .. stop - 1 of this rank. `round`, from 1, is what is announced, or waited for.
struct Instruction {
  int operation, round;
  int first, stop;
  int place;           // of a copy: the record of a set where `first` goes
  int source, sources; // of a pull, in the order in which they fold, and of a wait: which of the `Source`s
};

struct Source {
  int rank;  // or LANDED
  int place; // the record of that rank's set that belongs to `first`; of this rank's records, where it is the own rank
};

// windows: of every rank, a number for each block, and from byte `header` on two sets of records.
struct InMemory {
  const Instruction *program;
  const Source *sources;
  char *const *windows;
};

struct InParameters {
  char *windows[16];
  Instruction program[32];
  Source sources[128];
};

template <class Tables> struct PullArguments {
  float *records;              // [records, width], read and written
  const float *landed;         // [.., width], what messages brought before this launch
  long long *steps;            // that each block has done; GIVEN_UP once a rank did not come
  long long *late;             // of the host: round << 32 | rank + 1 of one that did not come
  float *out, *lse;            // as `finish` writes them, or null
  long long header, limit;     // bytes; nanoseconds that a rank is waited for
  int instructions, numbers;   // numbers: that a step counts, one more than its rounds
  int ends;                    // steps that end with this launch: 1, or 0 where others of the step follow
  int count, set, width, rank; // records: all of them, and of a set
  int heads, queries;          // as `finish` knows the records
  Tables tables;
};

constexpr int MAX_SOURCES = 128;
constexpr int LANDED = -1;
constexpr long long GIVEN_UP = -1;

template <class Arguments> __device__ __forceinline__ long long *number_of(const Arguments &a, int rank) {
  return reinterpret_cast<long long *>(a.tables.windows[rank]) + blockIdx.x;
}

template <class Arguments> __device__ __forceinline__ float *set_of(const Arguments &a, int rank, long long step) {
  return reinterpret_cast<float *>(a.tables.windows[rank] + a.header) + step % 2 * a.set * a.width;
}

// Every gridDim-th record is this block's: the first of them from `first` on.
__device__ __forceinline__ int first_of_block(int first) {
  const int blocks = gridDim.x, block = blockIdx.x;
  return first + (block + blocks - first % blocks) % blocks;
}

template <class Arguments> __device__ void copy(const Arguments &a, const Instruction &i, long long step) {
  float *slots = set_of(a, a.rank, step) + (long long)i.place * a.width;
  for (int record = first_of_block(i.first); record < i.stop; record += gridDim.x)
    copy_record(slots + (long long)(record - i.first) * a.width, a.records + (long long)record * a.width, a.width);
}

template <class Arguments> __device__ void announce(const Arguments &a, const Instruction &i, long long step) {
  __syncthreads(); // the block's copies are made
  if (threadIdx.x == 0) store_release(number_of(a, a.rank), step * a.numbers + i.round);
}

// Whether the rank announces the number in time. Where it does not, the host is told who and when, and so is whoever
// waits for this rank: then all give up at once.
template <class Arguments> __device__ bool comes(const Arguments &a, int rank, int round, long long step) {
  const long long wanted = step * a.numbers + round, began = nanoseconds();
  for (;;) {
    const long long seen = load_acquire(number_of(a, rank));
    if (seen >= 0 && seen >= wanted) return true;
    if (seen >= 0 && nanoseconds() - began <= a.limit) continue;
    const long long late = seen < 0 ? -seen : (long long)(round > 0 ? round : 0) << 32 | (rank + 1);
    store_release(a.late, late);
    store_release(number_of(a, a.rank), -late);
    return false;
  }
}

// Waits for all sources side by side. from: where record `first` of each lies.
template <class Arguments>
__device__ bool await(const Arguments &a, const Instruction &i, long long step, const float **from) {
  bool all = true;
  for (int s = threadIdx.x; s < i.sources; s += blockDim.x) {
    const Source source = a.tables.sources[i.source + s];
    const bool own = source.rank == a.rank, landed = source.rank == LANDED;
    const float *const held = own ? a.records : landed ? a.landed : set_of(a, source.rank, step);
    from[s] = held + (long long)source.place * a.width;
    all = (own || landed || comes(a, source.rank, i.round, step)) && all;
  }
  return __syncthreads_and(all); // what one thread saw is there for all
}

// Folds what the sources hold, left to right; what a single one holds is taken as it is.
template <class Arguments> __device__ void pull(const Arguments &a, const Instruction &i, const float *const *from) {
  for (int record = first_of_block(i.first); record < i.stop; record += gridDim.x) {
    const long long offset = (long long)(record - i.first) * a.width;
    fold_record([&](int source) { return from[source] + offset; }, i.sources, a.records + (long long)record * a.width,
                a.width);
  }
}

// No result is better than a wrong one.
template <class Arguments> __device__ void spoil(const Arguments &a) {
  for (int record = blockIdx.x; record < a.count; record += gridDim.x)
    for (int e = threadIdx.x; e < a.width; e += blockDim.x)
      a.records[(long long)record * a.width + e] = canonical_nan();
  __syncthreads(); // before they are finished
}

template <class Arguments> __device__ void finish_all(const Arguments &a) {
  const FinishArguments finish = {a.records, a.out, a.lse, a.heads, a.queries, a.width - RECORD_NUMERATOR};
  for (int record = blockIdx.x; record < a.count; record += gridDim.x) finish_record(finish, record);
}

template <class Tables> __global__ void __launch_bounds__(128) pull_partials(const PullArguments<Tables> a) {
  __shared__ const float *from[MAX_SOURCES];
  const long long step = a.steps[blockIdx.x];
  bool going = step != GIVEN_UP;
  for (int at = 0; going && at < a.instructions; ++at) {
    const Instruction i = a.tables.program[at];
    if (first_of_block(i.first) >= i.stop) continue;
    if (i.operation == COPY) copy(a, i, step);
    if (i.operation == ANNOUNCE) announce(a, i, step);
    if (i.operation == AWAIT || i.operation == PULL) going = await(a, i, step, from);
    if (i.operation == PULL && going) pull(a, i, from);
  }
  __syncthreads(); // everyone has read the step, and the block's records are there
  if (!going) spoil(a);
  if (a.out) finish_all(a);
  if (threadIdx.x == 0) a.steps[blockIdx.x] = going ? step + a.ends : GIVEN_UP;
}
