// The part of CUDA C++ that the kernels use, for an ordinary compiler: keywords, built-in variables, intrinsics.
#pragma once
#include <algorithm>
#include <chrono>
#include <cmath>
#include <type_traits>

#include "block.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static thread_local
#define __constant__ static

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::current->block->index)
#define blockDim (emulator::current->block->launch->block)
#define gridDim (emulator::current->block->launch->grid)

#define LINE int line = __builtin_LINE()

inline void __syncthreads(LINE) { emulator::meet_block(0, line); }
inline int __syncthreads_or(int p, LINE) { return emulator::meet_block(p, line).any_result; }
inline int __syncthreads_and(int p, LINE) { return emulator::meet_block(p, line).all_result; }
inline int __syncthreads_count(int p, LINE) { return emulator::meet_block(p, line).count_result; }
inline void __syncwarp(unsigned mask = ~0u, LINE) {
  emulator::meet(mask, emulator::Operation::sync_warp, nullptr, 0, line, true);
}

namespace emulator {
// The value of lane `from` of those that `mask` names.
template <class T> UNCHECKED T shuffle(unsigned mask, T value, int from, int line) {
  static_assert(sizeof(T) <= SLOT_BYTES);
  auto slots = meet(mask, Operation::shuffle, &value, sizeof value, line, false);
  if (!(mask >> from & 1)) fail("a shuffle reads a lane outside its mask", line);
  memcpy(&value, slots[from], sizeof value);
  return value;
}

UNCHECKED inline const void *const *exchange_addresses(const void *address, int alignment, LINE) {
  if (reinterpret_cast<uintptr_t>(address) % alignment) fail("a matrix row is not aligned", line);
  static thread_local const void *all[WARP];
  auto slots = meet(~0u, Operation::load_matrices, &address, sizeof address, line, false);
  for (int i = 0; i < WARP; ++i) memcpy(&all[i], slots[i], sizeof address);
  return all;
}

using Words = unsigned[SLOT_BYTES / sizeof(unsigned)];
UNCHECKED inline const Words *exchange_words(const unsigned (&mine)[6], LINE) {
  return reinterpret_cast<const Words *>(meet(~0u, Operation::multiply_matrices, mine, sizeof mine, line, false));
}
} // namespace emulator

template <class T> T __shfl_sync(unsigned mask, T value, int from, int width = 32, LINE) {
  const int lane = emulator::current->lane;
  return emulator::shuffle(mask, value, (lane & ~(width - 1)) | (from & (width - 1)), line);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32, LINE) {
  const int lane = emulator::current->lane, from = lane ^ distance;
  return emulator::shuffle(mask, value, (from & ~(width - 1)) > (lane & ~(width - 1)) ? lane : from, line);
}
UNCHECKED inline unsigned __ballot_sync(unsigned mask, int predicate, LINE) {
  const unsigned char mine = predicate != 0;
  auto slots = emulator::meet(mask, emulator::Operation::ballot, &mine, 1, line, false);
  unsigned result = 0;
  for (int i = 0; i < emulator::WARP; ++i) result |= mask >> i & 1 ? unsigned{slots[i][0]} << i : 0u;
  return result;
}
inline int __any_sync(unsigned mask, int predicate, LINE) { return __ballot_sync(mask, predicate, line) != 0; }
inline int __all_sync(unsigned mask, int predicate, LINE) { return __ballot_sync(mask, predicate, line) == mask; }

// A fence lets later atomics of this thread publish what it wrote: a missing one shows as a data race.
inline void __threadfence() { emulator::current->fenced = true; }

namespace emulator {
// Plain builtins: sanitizers must not take this lock for synchronisation of the kernel's.
inline bool atomics_locked = false;
template <class T, class F> UNCHECKED T update(T *at, F change) {
  while (__atomic_test_and_set(&atomics_locked, __ATOMIC_ACQUIRE)) {
  }
  T before;
  __atomic_load(at, &before, __ATOMIC_RELAXED);
  T after = change(before);
  __atomic_store(at, &after, __ATOMIC_RELAXED);
#if EMULATOR_TSAN
  __tsan_acquire(at);
  if (current->fenced) __tsan_release(at);
#endif
  __atomic_clear(&atomics_locked, __ATOMIC_RELEASE);
  return before;
}
} // namespace emulator
template <class T> T atomicAdd(T *at, T value) {
  return emulator::update(at, [value](T old) { return T(old + value); });
}
template <class T> T atomicMax(T *at, T value) {
  return emulator::update(at, [value](T old) { return old > value ? old : value; });
}
template <class T> T atomicExch(T *at, T value) {
  return emulator::update(at, [value](T) { return value; });
}

// Numbers that other devices look at, which may be threads of this process or other processes. The relaxed forms order
// nothing: faults are planted with them. Looking takes a while, in which others run.
namespace emulator {
template <class T> UNCHECKED void store_relaxed(T *at, T value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
template <class T> UNCHECKED void store_release(T *at, T value) {
#if EMULATOR_TSAN
  __tsan_release(at);
#endif
  __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
template <class T> UNCHECKED T load_relaxed(const T *at) {
  run_next();
  std::this_thread::sleep_for(std::chrono::microseconds(20));
  return __atomic_load_n(at, __ATOMIC_RELAXED);
}
template <class T> UNCHECKED T load_acquire(const T *at) {
  run_next();
  std::this_thread::sleep_for(std::chrono::microseconds(20));
  const T value = __atomic_load_n(at, __ATOMIC_ACQUIRE);
#if EMULATOR_TSAN
  __tsan_acquire(const_cast<T *>(at));
#endif
  return value;
}
inline long long nanoseconds() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}
} // namespace emulator

template <class To, class From> To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float __int_as_float(unsigned bits) { return bits_as<float>(bits); }
inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
inline unsigned __float_as_uint(float value) { return bits_as<unsigned>(value); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

// A kernel as a C function that ctypes can call; how many blocks are a cluster, or 0.
#define EXPORT_KERNEL(SYMBOL, CLUSTER, ...)                                                                            \
  extern "C" __attribute__((visibility("default"))) int SYMBOL(const unsigned *grid, const unsigned *block,            \
                                                               size_t shared_bytes, void **arguments, unsigned seed,   \
                                                               int workers, char *message, size_t message_bytes) {     \
    return emulator::launch(__VA_ARGS__, CLUSTER, grid, block, shared_bytes, arguments, seed, workers, message,        \
                            message_bytes);                                                                            \
  }
