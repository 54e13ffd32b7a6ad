// Blocks of CUDA threads on the processor: one fiber for each thread, warps of 32, blocks spread over the operating
// system's threads. Strict on purpose: deadlocks, divergent barriers and wrong masks are reported, shared memory starts
// out as NaN, asynchronous copies land as late as they may.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>
#include <vector>

#include <link.h>

#include "fiber.h"

struct uint3 {
  unsigned x, y, z;
};

namespace emulator {

constexpr int MAX_WORKERS = 256, MAX_CLUSTER = 16;
constexpr int WARP = 32, MAX_COPIES = 512, MAX_MASKS = 16, SLOT_BYTES = 32;

enum class Operation { shuffle, ballot, sync_warp, load_matrices, multiply_matrices };

// Lanes of one warp that meet under one mask. Two sets of slots: a lane may bring its next value while others still
// read the last ones.
struct Meeting {
  unsigned mask, arrived, round;
  Operation operation;
  alignas(16) unsigned char slots[2][WARP][SLOT_BYTES];
};

struct Copy {
  void *to;
  const void *from;
  int bytes, read, group; // `bytes` land, of which `read` come from `from` and the rest are 0
};

struct Block;

struct Fiber {
  Context context;
  Block *block;
  uint3 thread;
  int index, lane, warp;
  bool done, fenced;
  const char *waits_at;
  int line;
  Copy *copies;
  int copy_count, copy_group;
};

struct Warp {
  unsigned ready; // lanes that can run
  int masks;
  Meeting meetings[MAX_MASKS];
};

// What threads bring to one barrier must not reach those that still leave the one before: two clocks take turns.
struct Barrier {
  int arrived;
  unsigned round;
  char clocks[2];
  int any, all, count, any_result, all_result, count_result;
  int first_line;
};

// The memory of this library's thread-local variables, which is where `__shared__` ones are.
struct Range {
  unsigned char *start;
  size_t bytes;
};

// Blocks that run at once, each on a thread of the operating system. Rounds are barriers of all of them: what a block
// reads of another's shared memory is ordered by these alone, whatever the threads' own times are.
struct Cluster {
  int arrived, ended;
  unsigned round;
  char clocks[2];
  struct Member {
    Range shared[2]; // dynamic and static
    int ended;
    unsigned read_until; // 1 more than the last round in which another block read them
  } members[MAX_CLUSTER];
};

struct Launch {
  uint3 grid, block;
  int cluster; // how many blocks of a row are one, or 0
  std::vector<Cluster> clusters;
  int workers;
  size_t shared_bytes;
  void (*call)(void *kernel, void **arguments);
  void *kernel;
  void **arguments;
  unsigned seed;
  std::atomic<long> next_block{0};
  std::atomic<bool> failed{false};
  char message[512] = "";
  std::atomic<int> mapped{0}, finished{0};
  char *stacks[MAX_WORKERS];
};

struct Block {
  Launch *launch;
  uint3 index;
  Context scheduler;
  Fiber *fibers;
  Warp *warps;
  int threads, warp_count, live;
  Barrier barrier;
  unsigned *barrier_waiting; // for each warp, the lanes that wait
  unsigned char *dynamic_shared;
  Cluster *cluster; // or null
  int rank;
  unsigned round;  // of the cluster
  uint64_t random; // 0: threads take turns in order
  bool stopped;
};

inline thread_local Fiber *current = nullptr;

UNCHECKED inline unsigned draw(uint64_t &state, unsigned below) { // xorshift
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return static_cast<unsigned>(state >> 33) % below;
}

UNCHECKED inline int pick_lane(unsigned lanes, int after, uint64_t &random) {
  if (random) {
    for (int skip = draw(random, __builtin_popcount(lanes)); skip; --skip) lanes &= lanes - 1;
    return __builtin_ctz(lanes);
  }
  const unsigned later = after >= WARP - 1 ? 0u : lanes & (~0u << (after + 1));
  return __builtin_ctz(later ? later : lanes);
}

// Runs another thread of the block that can run; the scheduler if there is none.
UNCHECKED inline void run_next(bool last = false) {
  Fiber *me = current;
  Block *block = me->block;
  const int start = block->random ? draw(block->random, block->warp_count) : me->warp;
  for (int i = 0; i < block->warp_count; ++i) {
    const int w = (start + i) % block->warp_count;
    if (!block->warps[w].ready) continue;
    Fiber *next =
        &block->fibers[w * WARP + pick_lane(block->warps[w].ready, w == me->warp ? me->lane : WARP, block->random)];
    if (next == me) return;
    current = next;
    switch_context(me->context, next->context, last);
    current = me;
    return;
  }
  block->stopped = block->live > 0; // nobody can run, yet not all are done
  switch_context(me->context, block->scheduler, last);
  current = me;
}

// Ends the launch with a message that names the place.
UNCHECKED inline void fail(const char *what, int line) {
  Fiber *me = current;
  Launch *launch = me->block->launch;
  if (!launch->failed.exchange(true))
    snprintf(launch->message, sizeof launch->message, "%s: line %d, block (%u, %u, %u), thread %d", what, line,
             me->block->index.x, me->block->index.y, me->block->index.z, me->index);
  me->block->stopped = true;
  switch_context(me->context, me->block->scheduler, true);
}

UNCHECKED inline void wait_at(const char *what, int line) {
  Fiber *me = current;
  me->waits_at = what;
  me->line = line;
  me->block->warps[me->warp].ready &= ~(1u << me->lane);
  run_next();
  me->waits_at = nullptr;
}

UNCHECKED inline Meeting *find_meeting(unsigned mask, int line) {
  Warp &warp = current->block->warps[current->warp];
  for (int i = 0; i < warp.masks; ++i)
    if (warp.meetings[i].mask == mask) return &warp.meetings[i];
  if (warp.masks == MAX_MASKS) fail("too many different warp masks", line);
  Meeting *meeting = &warp.meetings[warp.masks++];
  memset(static_cast<void *>(meeting), 0, sizeof *meeting);
  meeting->mask = mask;
  return meeting;
}

// Brings `bytes` to the lanes of `mask`, waits for all of them, and returns everyone's slots. `ordering`: memory
// written before is seen after, as __syncwarp promises and a shuffle does not.
UNCHECKED inline unsigned char (*meet(unsigned mask, Operation operation, const void *value, size_t bytes, int line,
                                      bool ordering)) [SLOT_BYTES] {
  Fiber *me = current;
  if (!(mask >> me->lane & 1)) fail("the calling lane is not in the warp mask", line);
  Meeting *meeting = find_meeting(mask, line);
  if (meeting->arrived && meeting->operation != operation)
    fail("lanes of one mask execute different warp operations", line);
  meeting->operation = operation;
  unsigned char (*slots)[SLOT_BYTES] = meeting->slots[meeting->round & 1];
  for (size_t i = 0; i < bytes; ++i) slots[me->lane][i] = static_cast<const unsigned char *>(value)[i];
  meeting->arrived |= 1u << me->lane;
#if EMULATOR_TSAN
  if (ordering) __tsan_release(slots);
#endif
  if (meeting->arrived == mask) {
    meeting->arrived = 0;
    meeting->round++;
    me->block->warps[me->warp].ready |= mask;
    if (me->block->random) run_next();
  } else {
    wait_at("a warp operation", line);
  }
#if EMULATOR_TSAN
  if (ordering) __tsan_acquire(slots);
#endif
  (void)ordering;
  return slots;
}

// All threads of the block that have not ended must come; one that ended already is a fault too.
UNCHECKED inline Barrier &meet_block(int predicate, int line, const char *what = "a block barrier") {
  Fiber *me = current;
  Block *block = me->block;
  Barrier &barrier = block->barrier;
  if (!barrier.arrived) {
    barrier.any = barrier.count = 0;
    barrier.all = 1;
    barrier.first_line = line;
  } else if (barrier.first_line != line) {
    fail("threads of one block wait at different barriers", line);
  }
  barrier.any |= predicate != 0;
  barrier.all &= predicate != 0;
  barrier.count += predicate != 0;
  barrier.arrived++;
  char *clock = &barrier.clocks[barrier.round & 1];
#if EMULATOR_TSAN
  __tsan_release(clock);
#endif
  if (barrier.arrived == block->threads) {
    barrier.arrived = 0;
    barrier.round++;
    barrier.any_result = barrier.any;
    barrier.all_result = barrier.all;
    barrier.count_result = barrier.count;
    for (int w = 0; w < block->warp_count; ++w) {
      block->warps[w].ready |= block->barrier_waiting[w];
      block->barrier_waiting[w] = 0;
    }
    if (block->random) run_next();
  } else {
    block->barrier_waiting[me->warp] |= 1u << me->lane;
    wait_at(what, line);
  }
#if EMULATOR_TSAN
  __tsan_acquire(clock);
#endif
  (void)clock;
  return barrier;
}

// Waits until all blocks of the cluster have come; one that ended already is a fault too.
UNCHECKED inline void meet_other_blocks(int line) {
  Block *block = current->block;
  Cluster *cluster = block->cluster;
  if (__atomic_add_fetch(&cluster->arrived, 1, __ATOMIC_SEQ_CST) == block->launch->cluster) {
    __atomic_store_n(&cluster->arrived, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&cluster->round, block->round + 1, __ATOMIC_SEQ_CST);
  }
  while (true) {
    const int ended = __atomic_load_n(&cluster->ended, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&cluster->round, __ATOMIC_SEQ_CST) != block->round) break;
    if (ended || block->launch->failed) fail("a block waits for its cluster, of which another ended", line);
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  block->round++;
}

// All threads of all blocks of the cluster. `ordered`: what they wrote before is there after.
UNCHECKED inline void meet_cluster(bool ordered = true, int line = __builtin_LINE()) {
  Block *block = current->block;
  if (!block->cluster) fail("a kernel without clusters waits for one", line);
  const unsigned round = block->round;
  char *clock = &block->cluster->clocks[round & 1];
#if EMULATOR_TSAN
  if (ordered) __tsan_release(clock);
#endif
  meet_block(0, line, "a barrier of its cluster");
  if (block->round == round) meet_other_blocks(line); // one thread for all
#if EMULATOR_TSAN
  if (ordered) __tsan_acquire(clock);
#endif
  (void)clock, (void)ordered;
}

// Where in block `rank` of the cluster that lies which `own` points to in this one.
UNCHECKED inline const void *map_shared_rank(const void *own, int rank, int line = __builtin_LINE()) {
  Block *block = current->block;
  if (!block->cluster || rank < 0 || rank >= block->launch->cluster) fail("no such block in the cluster", line);
  if (!block->round) fail("a block reads the shared memory of one that need not have begun", line);
  Cluster::Member &member = block->cluster->members[rank];
  for (unsigned until = __atomic_load_n(&member.read_until, __ATOMIC_SEQ_CST); rank != block->rank;)
    if (until > block->round || __atomic_compare_exchange_n(&member.read_until, &until, block->round + 1, false,
                                                            __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
      break;
  if (__atomic_load_n(&member.ended, __ATOMIC_SEQ_CST))
    fail("a block reads the shared memory of one that has ended", line);
  const unsigned char *address = static_cast<const unsigned char *>(own);
  for (int i = 0; i < 2; ++i) {
    const Range &mine = block->cluster->members[block->rank].shared[i];
    if (address >= mine.start && address < mine.start + mine.bytes)
      return member.shared[i].start + (address - mine.start);
  }
  fail("what another block shall have is not in shared memory", line);
  return nullptr;
}

inline void *dynamic_shared() { return current->block->dynamic_shared; }

// ---- asynchronous copies: the destination is poisoned at once, the bytes land only at the wait that covers them

UNCHECKED inline void copy_async(void *to, const void *from, int bytes, int read, int line = __builtin_LINE()) {
  Fiber *me = current;
  if ((reinterpret_cast<uintptr_t>(to) | (read ? reinterpret_cast<uintptr_t>(from) : 0)) % bytes)
    fail("an asynchronous copy is not aligned", line);
  if (me->copy_count == MAX_COPIES) fail("too many asynchronous copies in flight", line);
  memset(to, 0xff, bytes);
  me->copies[me->copy_count++] = {to, from, bytes, read, me->copy_group};
}

UNCHECKED inline void copy_async_commit() { current->copy_group++; }

UNCHECKED inline void copy_async_wait(int pending) {
  Fiber *me = current;
  int kept = 0;
  for (int i = 0; i < me->copy_count; ++i) {
    const Copy copy = me->copies[i];
    if (copy.group >= me->copy_group - pending) {
      me->copies[kept++] = copy;
      continue;
    }
    if (copy.read) memcpy(copy.to, copy.from, copy.read);
    if (copy.bytes > copy.read) memset(static_cast<char *>(copy.to) + copy.read, 0, copy.bytes - copy.read);
  }
  me->copy_count = kept;
}

// ---- launching

UNCHECKED inline void start_fiber() {
  Block *block = current->block;
#if EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
#if EMULATOR_TSAN
  __tsan_acquire(&block->threads); // not what ending threads release: one's end orders nothing for another
#endif
  block->launch->call(block->launch->kernel, block->launch->arguments);
#if EMULATOR_TSAN
  __tsan_release(&block->live);
#endif
  current->done = true;
  block->live--;
  block->warps[current->warp].ready &= ~(1u << current->lane);
  run_next(true);
  __builtin_trap(); // a thread that ended never runs again
}

inline int find_thread_locals(dl_phdr_info *info, size_t, void *found) {
  const char *data = static_cast<const char *>(info->dlpi_tls_data);
  const char *anchor = reinterpret_cast<const char *>(&current);
  for (int i = 0; data && i < info->dlpi_phnum; ++i) {
    const size_t bytes = info->dlpi_phdr[i].p_memsz;
    if (info->dlpi_phdr[i].p_type != PT_TLS || anchor < data || anchor >= data + bytes) continue;
    *static_cast<Range *>(found) = {static_cast<unsigned char *>(info->dlpi_tls_data), bytes};
    return 1;
  }
  return 0;
}

// 0xff in every byte: NaN as float16, bfloat16 and float32.
UNCHECKED inline void poison(void *start, size_t bytes) {
  volatile unsigned char *at = static_cast<volatile unsigned char *>(start);
  for (size_t i = 0; i < bytes; ++i) at[i] = 0xff;
}

UNCHECKED inline void report_deadlock(const Block &block) {
  Launch *launch = block.launch;
  if (launch->failed.exchange(true)) return;
  size_t used = snprintf(launch->message, sizeof launch->message, "deadlock in block (%u, %u, %u):", block.index.x,
                         block.index.y, block.index.z);
  int ended = 0, named = 0;
  for (int t = 0; t < block.threads; ++t) {
    const Fiber &fiber = block.fibers[t];
    ended += fiber.done;
    if (fiber.done || !fiber.waits_at || named++ >= 3) continue;
    used += snprintf(launch->message + used, sizeof launch->message - used, " thread %d waits at %s, line %d;", t,
                     fiber.waits_at, fiber.line);
  }
  snprintf(launch->message + used, sizeof launch->message - used, " %d threads ended", ended);
}

// Sets a block's threads to their start.
UNCHECKED inline void reset_block(Block &block, long number, char *stacks, Copy *copies) {
  const Launch &launch = *block.launch;
  const uint3 &grid = launch.grid, &shape = launch.block;
  block.index = {unsigned(number % grid.x), unsigned(number / grid.x % grid.y), unsigned(number / grid.x / grid.y)};
  block.random =
      launch.seed > 1 ? (0x9e3779b97f4a7c15u * (launch.seed + 1) ^ uint64_t(number) * 0xbf58476d1ce4e5b9u) | 1 : 0;
  block.barrier.arrived = 0;
  block.live = block.threads;
  block.stopped = false;
  for (int w = 0; w < block.warp_count; ++w) {
    const int lanes = block.threads - w * WARP;
    block.warps[w].ready = lanes >= WARP ? ~0u : (1u << lanes) - 1;
    block.warps[w].masks = 0;
    block.barrier_waiting[w] = 0;
  }
  for (int t = 0; t < block.threads; ++t) {
    Fiber &fiber = block.fibers[t];
    char *stack = stacks + STACK_BYTES * t;
    void *tsan = fiber.context.tsan;
    fiber = Fiber{};
    fiber.context.tsan = tsan;
    fiber.context.stack_bottom = stack;
    fiber.context.stack_bytes = STACK_BYTES;
    fiber.context.stack_pointer = prepare_stack(stack + STACK_BYTES, start_fiber);
    fiber.block = &block;
    fiber.thread = {t % shape.x, t / shape.x % shape.y, t / shape.x / shape.y};
    fiber.index = t;
    fiber.lane = t % WARP;
    fiber.warp = t / WARP;
    fiber.copies = copies + size_t{MAX_COPIES} * t;
  }
}

UNCHECKED inline void run_block(Block &block) {
  Fiber *first = &block.fibers[block.random ? pick_lane(block.warps[0].ready, WARP, block.random) : 0];
#if EMULATOR_TSAN
  __tsan_release(&block.threads);
#endif
  current = first;
  switch_context(block.scheduler, first->context, false);
  current = nullptr;
#if EMULATOR_TSAN
  __tsan_acquire(&block.live);
#endif
  if (block.stopped) report_deadlock(block);
}

inline void begin_in_cluster(Block &block, long number, const Range &locals) {
  const Launch &launch = *block.launch;
  block.cluster = &block.launch->clusters[number / launch.cluster];
  block.rank = number % launch.cluster;
  block.round = 0;
  Cluster::Member &member = block.cluster->members[block.rank];
  member.shared[0] = {block.dynamic_shared, launch.shared_bytes};
  member.shared[1] = locals;
}

// What others of its cluster read of a block, they must have read before a barrier that this one passed, too.
UNCHECKED inline void end_in_cluster(const Block &block) {
  Cluster::Member &member = block.cluster->members[block.rank];
  __atomic_store_n(&member.ended, 1, __ATOMIC_SEQ_CST);
  __atomic_add_fetch(&block.cluster->ended, 1, __ATOMIC_SEQ_CST);
  Launch *launch = block.launch;
  if (__atomic_load_n(&member.read_until, __ATOMIC_SEQ_CST) > block.round && !launch->failed.exchange(true))
    snprintf(launch->message, sizeof launch->message,
             "block (%u, %u, %u) ends while others of its cluster may read its shared memory", block.index.x,
             block.index.y, block.index.z);
}

UNCHECKED inline void find_own_stack(Context &context) {
  pthread_attr_t attributes;
  void *bottom = nullptr;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &bottom, &context.stack_bytes);
  pthread_attr_destroy(&attributes);
  context.stack_bottom = bottom;
}

// The next of `blocks` for a worker that has done `done`: of clusters each takes the same part of one after another.
inline long next_block(Launch &launch, int worker, long done, long blocks) {
  const int size = launch.cluster;
  if (size) return (worker / size + done * (launch.workers / size)) * size + worker % size;
  return launch.next_block.fetch_add(1, std::memory_order_relaxed);
}

// One thread of the operating system: takes blocks until none is left.
inline void work(Launch *launch, int worker) {
  const long blocks = long{launch->grid.x} * launch->grid.y * launch->grid.z;
  Block block{};
  block.launch = launch;
  block.threads = launch->block.x * launch->block.y * launch->block.z;
  block.warp_count = (block.threads + WARP - 1) / WARP;
  std::vector<Fiber> fibers(block.threads);
  std::vector<Warp> warps(block.warp_count);
  std::vector<unsigned> waiting(block.warp_count);
  std::vector<Copy> copies(size_t{MAX_COPIES} * block.threads);
  block.fibers = fibers.data();
  block.warps = warps.data();
  block.barrier_waiting = waiting.data();
  std::vector<unsigned char> shared(launch->shared_bytes + 2 * 128);
  const uintptr_t start = (reinterpret_cast<uintptr_t>(shared.data()) + 127) & ~uintptr_t{127};
  block.dynamic_shared = reinterpret_cast<unsigned char *>(start);
  char *stacks = map_stacks(block.threads);
  launch->stacks[launch->mapped.fetch_add(1, std::memory_order_relaxed)] = stacks;
  find_own_stack(block.scheduler);
#if EMULATOR_TSAN
  block.scheduler.tsan = __tsan_get_current_fiber();
  for (Fiber &fiber : fibers) fiber.context.tsan = __tsan_create_fiber(0);
#endif
#if EMULATOR_ASAN
  ASAN_POISON_MEMORY_REGION(shared.data(), shared.size());
  ASAN_UNPOISON_MEMORY_REGION(block.dynamic_shared, launch->shared_bytes);
#endif
  // Thread-local memory exists from its first use on; the compiler must not drop this one.
  *const_cast<Fiber *volatile *>(&current) = nullptr;
  Range locals{nullptr, 0};
  dl_iterate_phdr(find_thread_locals, &locals);
  for (long done = 0; !launch->failed; ++done) {
    const long next = next_block(*launch, worker, done, blocks);
    if (next >= blocks) break;
    const long number = launch->seed % 2 ? blocks - 1 - next : next;
    reset_block(block, number, stacks, copies.data());
    if (!locals.start) abort(); // static shared memory would not be poisoned
    poison(locals.start, locals.bytes);
    current = nullptr;
    poison(block.dynamic_shared, launch->shared_bytes);
    if (launch->cluster) begin_in_cluster(block, number, locals);
    run_block(block);
    if (block.cluster) end_in_cluster(block);
    if (EMULATOR_TSAN) break;
  }
  // What others of a cluster look at lies in this thread's memory.
  launch->finished++;
  while (launch->cluster && launch->finished < launch->workers)
    std::this_thread::sleep_for(std::chrono::microseconds(20));
#if EMULATOR_TSAN
  for (Fiber &fiber : fibers) __tsan_destroy_fiber(fiber.context.tsan);
#endif
#if EMULATOR_ASAN
  ASAN_UNPOISON_MEMORY_REGION(shared.data(), shared.size());
#endif
}

template <class... A, size_t... I> void apply(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
  kernel(*static_cast<A *>(arguments[I])...);
}
template <class... A> void call(void *kernel, void **arguments) {
  apply(reinterpret_cast<void (*)(A...)>(kernel), arguments, std::index_sequence_for<A...>{});
}

// Runs a grid on `workers` threads. Returns 0, or 1 with a message. Seeds: 0 takes blocks and threads in order, odd
// ones take blocks backwards, 2 and above take threads in a random order. `cluster` blocks of a row are one; 0: none.
template <class... A>
int launch(void (*kernel)(A...), int cluster, const unsigned *grid, const unsigned *block, size_t shared_bytes,
           void **arguments, unsigned seed, int workers, char *message, size_t message_bytes) {
  Launch l;
  l.grid = {grid[0], grid[1], grid[2]};
  l.block = {block[0], block[1], block[2]};
  l.shared_bytes = shared_bytes;
  l.call = call<A...>;
  l.kernel = reinterpret_cast<void *>(kernel);
  l.arguments = arguments;
  l.seed = seed;
  const long blocks = long{grid[0]} * grid[1] * grid[2];
  if (cluster && (cluster > MAX_CLUSTER || grid[0] % cluster)) {
    snprintf(message, message_bytes, "a row of %u blocks is not whole clusters of %d", grid[0], cluster);
    return 1;
  }
  l.cluster = cluster;
  if (cluster) l.clusters.resize(blocks / cluster);
  if (cluster) workers = cluster;
  // To ThreadSanitizer one block after the other on a thread would look ordered: each has a thread of its own there.
  if (EMULATOR_TSAN) workers = static_cast<int>(blocks);
  if (workers > MAX_WORKERS) {
    snprintf(message, message_bytes, "at most %d blocks can run under ThreadSanitizer", MAX_WORKERS);
    return 1;
  }
  l.workers = workers;
  std::vector<std::thread> threads;
  for (int i = 0; i < workers; ++i) threads.emplace_back(work, &l, i);
  for (std::thread &thread : threads) thread.join();
  // ThreadSanitizer would take one worker's use of another's old stack for a race, also of another launch.
  for (int i = 0; i < l.mapped && !EMULATOR_TSAN; ++i) unmap_stacks(l.stacks[i], block[0] * block[1] * block[2]);
  snprintf(message, message_bytes, "%s", l.message);
  return l.failed;
}

} // namespace emulator
