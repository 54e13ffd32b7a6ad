// Everything that CUDA C++ cannot say portably: the only file with inline assembly, each piece beside a plain C++
// twin that the emulator (tests/emulator) runs, and AMD's compilers take where it says the same to them
// (TREEATTN_PLAIN; what else they need is in amd.cuh). No header is included: NVRTC needs none to be installed.
//
// 16-bit numbers are carried as their bits. The operations called `exact` keep subnormal numbers whatever the
// -ftz flag says (CuPy always sets it), and are never contracted: the merge of records is defined to the bit.
#pragma once

#ifdef __HIP__
#include "amd.cuh"
#endif
#if defined(TREEATTN_EMULATOR) || defined(__HIP__)
#define TREEATTN_PLAIN
#endif

#ifdef TREEATTN_EMULATOR
#define DYNAMIC_SHARED(T, name) T *name = reinterpret_cast<T *>(emulator::dynamic_shared())
#else
#define DYNAMIC_SHARED(T, name)                                                                                        \
  extern __shared__ __align__(128) unsigned char dynamic_shared_bytes[];                                               \
  T *name = reinterpret_cast<T *>(dynamic_shared_bytes)
#endif

struct float16 {
  unsigned short bits;
};
struct bfloat16 {
  unsigned short bits;
};

// Of 8 bits, as caches store them: sign, exponent and mantissa of 1, 4 and 3 bits (without infinity, NaN is all ones),
// and of 1, 5 and 2.
struct float8_e4m3fn {
  unsigned char bits;
};
struct float8_e5m2 {
  unsigned char bits;
};

// What one load instruction brings: 16 bytes.
struct alignas(16) Vector {
  unsigned word[4];
};

// The same as numbers.
struct alignas(16) Floats {
  float element[4];
};

// ---- arithmetic with IEEE results

__device__ __forceinline__ float fma_exact(float a, float b, float c) {
#ifdef TREEATTN_PLAIN
  return fmaf(a, b, c);
#else
  float result;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
#endif
}

__device__ __forceinline__ float add_exact(float a, float b) {
#ifdef TREEATTN_PLAIN
  return a + b;
#else
  float result;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#endif
}

__device__ __forceinline__ float multiply_exact(float a, float b) {
#ifdef TREEATTN_PLAIN
  return a * b;
#else
  float result;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#endif
}

__device__ __forceinline__ float divide_exact(float a, float b) {
#ifdef TREEATTN_PLAIN
  return a / b;
#else
  float result;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#endif
}

// a > b; false where one of them is NaN.
__device__ __forceinline__ bool greater_exact(float a, float b) {
#ifdef TREEATTN_PLAIN
  return a > b;
#else
  int result;
  asm("{ .reg .pred p; setp.gt.f32 p, %1, %2; selp.s32 %0, 1, 0, p; }" : "=r"(result) : "f"(a), "f"(b));
  return result != 0;
#endif
}

__device__ __forceinline__ double widen_exact(float a) {
#ifdef TREEATTN_PLAIN
  return a;
#else
  double result;
  asm("cvt.f64.f32 %0, %1;" : "=d"(result) : "f"(a));
  return result;
#endif
}

// The nearest float32, subnormal numbers included.
__device__ __forceinline__ float narrow_exact(double a) {
#ifdef TREEATTN_PLAIN
  return static_cast<float>(a);
#else
  float result;
  asm("cvt.rn.f32.f64 %0, %1;" : "=f"(result) : "d"(a));
  return result;
#endif
}

// 2^x to about two units in the last place; 0 for -inf, NaN for NaN.
__device__ __forceinline__ float exp2_fast(float x) {
#ifdef TREEATTN_PLAIN
  return exp2f(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

// 1 / x to about a unit in the last place; 0 for infinity.
__device__ __forceinline__ float reciprocal_fast(float x) {
#ifdef TREEATTN_PLAIN
  return 1.0f / x;
#else
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

// ---- 16-bit numbers

__device__ __forceinline__ float to_float(bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }

__device__ __forceinline__ float to_float(float16 x) {
#ifdef TREEATTN_PLAIN
  const unsigned sign = (x.bits & 0x8000u) << 16, magnitude = (x.bits & 0x7fffu) << 13;
  if (magnitude < (1u << 23)) { // zero or subnormal: count in units of 2^-24
    const float value = static_cast<float>(magnitude >> 13) * 0x1p-24f;
    return sign ? -value : value;
  }
  const unsigned special = magnitude >= (31u << 23) ? 112u << 23 : 0u; // infinity and NaN
  return __uint_as_float(sign | (magnitude + (112u << 23) + special));
#else
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
#endif
}

// ---- 8-bit numbers: the upper byte of a float16, or one moved to where it has another exponent

// Compute capability 8.9 and above convert two numbers of 8 bits at once; of 8.9 CUDA 12.0 does not know it.
#if !defined(TREEATTN_PLAIN) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#if __CUDA_ARCH__ >= 900 || __CUDACC_VER_MAJOR__ > 12 || __CUDACC_VER_MINOR__ > 0
#define TREEATTN_CONVERTS_E4M3
#endif
#endif

// What `dequantize` leaves to be multiplied with: float16 counts exponents from another number than float8_e4m3fn.
template <typename T> constexpr float UNIT = 1.0f;
#ifndef TREEATTN_CONVERTS_E4M3
template <> constexpr float UNIT<float8_e4m3fn> = 256.0f;
#endif

// The sixteen numbers of a vector as float32, each divided by UNIT.
__device__ __forceinline__ void dequantize(const Vector &v, float *to, float8_e5m2) {
#pragma unroll
  for (int i = 0; i < 16; ++i) to[i] = to_float(float16{(unsigned short)((v.word[i / 4] >> i % 4 * 8 & 0xffu) << 8)});
}

__device__ __forceinline__ void dequantize(const Vector &v, float *to, float8_e4m3fn) {
#ifdef TREEATTN_CONVERTS_E4M3
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    unsigned pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((unsigned short)(v.word[i / 2] >> i % 2 * 16)));
    to[2 * i] = to_float(float16{(unsigned short)(pair & 0xffffu)});
    to[2 * i + 1] = to_float(float16{(unsigned short)(pair >> 16)});
  }
#else
  unsigned invalid = 0u;        // the upper bit of a byte whose other bits are all set
#pragma unroll
  for (int i = 0; i < 8; ++i) { // two bytes of a word at a time, each into a half of it
    const unsigned word = v.word[i / 2] >> i % 2 * 8;
    const unsigned pair = (word & 0x00800080u) << 8 | (word & 0x007f007fu) << 7;
    to[i / 2 * 4 + i % 2] = to_float(float16{(unsigned short)(pair & 0xffffu)});
    to[i / 2 * 4 + i % 2 + 2] = to_float(float16{(unsigned short)(pair >> 16)});
    invalid |= (word & 0x007f007fu) + 0x00010001u;
  }
  if (!(invalid & 0x00800080u)) return;
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if ((v.word[i / 4] >> i % 4 * 8 & 0x7fu) == 0x7fu) to[i] = __uint_as_float(0x7fc00000u);
#endif
}

#ifdef TREEATTN_PLAIN
// Round to nearest, ties to even.
__device__ __forceinline__ unsigned short narrow(float value, bfloat16) {
  const unsigned bits = __float_as_uint(value);
  if (value != value) return 0x7fff;
  return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

__device__ __forceinline__ unsigned short narrow(float value, float16) {
  const unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u;
  const float magnitude = fabsf(value);
  if (value != value) return 0x7fff;
  if (magnitude >= 65520.0f) return static_cast<unsigned short>(sign | 0x7c00u);
  if (magnitude < 0x1p-14f) return static_cast<unsigned short>(sign | (unsigned)nearbyintf(magnitude * 0x1p24f));
  const unsigned rebiased = (bits & 0x7fffffffu) - (112u << 23);
  return static_cast<unsigned short>(sign | ((rebiased + 0xfffu + (rebiased >> 13 & 1u)) >> 13));
}
#endif

// Two numbers of 16 bits in a word, `low` in the lower half, rounded to nearest.
__device__ __forceinline__ unsigned pack(float low, float high, float16 type) {
#ifdef TREEATTN_PLAIN
  return narrow(low, type) | (unsigned)narrow(high, type) << 16;
#else
  // cvt.rn.f16x2.f32 needs sm_80; two conversions serve every architecture and cost nothing beside the products.
  unsigned short a, b;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(a) : "f"(low));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(b) : "f"(high));
  return a | (unsigned)b << 16;
#endif
}

__device__ __forceinline__ unsigned pack(float low, float high, bfloat16 type) {
#ifdef TREEATTN_PLAIN
  return narrow(low, type) | (unsigned)narrow(high, type) << 16;
#else
  unsigned result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
#endif
}

// The sixteen numbers of a vector as such pairs, each divided by UNIT: exact.
template <typename T, typename Wide>
__device__ __forceinline__ void dequantize(const Vector &v, Vector *to, T narrow_type, Wide type) {
  float number[16];
  dequantize(v, number, narrow_type);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i / 4].word[i % 4] = pack(number[2 * i], number[2 * i + 1], type);
}

#ifdef TREEATTN_CONVERTS_E4M3
__device__ __forceinline__ void dequantize(const Vector &v, Vector *to, float8_e4m3fn, float16) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;"
        : "=r"(to[i / 4].word[i % 4])
        : "h"((unsigned short)(v.word[i / 2] >> i % 2 * 16)));
}
#endif

// ---- memory

// Keys and values are read once in a step: they should push nothing else out of the first level of caches, and where
// policies say so (from sm_80 on), out of the second: not scratch memory, nor what the next kernels need.
#if !defined(TREEATTN_PLAIN) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define CACHE_HINT ".L2::cache_hint"
#define BY_POLICY ", policy"
__device__ __forceinline__ unsigned long long evict_first() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
#else
#define CACHE_HINT
#define BY_POLICY
__device__ __forceinline__ unsigned long long evict_first() { return 0; }
#endif

// 16 bytes of them; zeros, and nothing read, where `valid` is false. A predicate: compilers would branch around some.
__device__ __forceinline__ Vector load_once(const void *from, bool valid) {
#ifdef TREEATTN_PLAIN
  return valid ? *static_cast<const Vector *>(from) : Vector{};
#else
  Vector v;
  asm("{ .reg .pred valid; .reg .b64 at, policy; mov.b64 at, %4; setp.ne.s32 valid, %5, 0; mov.b64 policy, %6;"
      "  mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
      "  @valid ld.global.nc.L1::no_allocate" CACHE_HINT ".v4.u32 {%0, %1, %2, %3}, [at]" BY_POLICY "; }"
      : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
      : "l"(from), "r"((int)valid), "l"(evict_first()));
  return v;
#endif
}

// What other blocks of this launch wrote: from the second-level cache, since the first may hold what was there before.
template <typename T> __device__ __forceinline__ T load_fresh(const T *from) {
  static_assert(sizeof(T) == 8 || sizeof(T) == 16, "one load instruction");
#ifdef TREEATTN_PLAIN
  return *from;
#else
  T value;
  float *to = reinterpret_cast<float *>(&value);
  if constexpr (sizeof(T) == 8)
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "l"(from) : "memory");
  else
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "l"(from)
                 : "memory");
  return value;
#endif
}

// Adds to a counter that blocks share and returns what it was. What this block wrote before (other threads of it:
// before a barrier) is there for whoever sees the new count, and what others wrote before they counted is there for
// this one.
__device__ __forceinline__ unsigned add_ordered(unsigned *counter, unsigned value) {
#ifdef TREEATTN_PLAIN
  __threadfence();
  const unsigned before = atomicAdd(counter, value);
  __threadfence();
  return before;
#else
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
  return before;
#endif
}

#ifndef __HIP__ // from here on it is the tensor-core path's alone

// Asynchronous copy of 16 bytes to shared memory; zeros land there when `valid` is false, and nothing is read. GPUs
// before sm_80 have no such copies: it is made at once.
__device__ __forceinline__ void copy_async(void *to, const void *from, bool valid) {
#ifdef TREEATTN_EMULATOR
  emulator::copy_async(to, from, 16, valid ? 16 : 0);
#elif __CUDA_ARCH__ < 800
  *static_cast<Vector *>(to) = load_once(from, valid);
#else
  const unsigned address = (unsigned)__cvta_generic_to_shared(to), bytes = valid ? 16 : 0;
  // Without a cache policy: of one ptxas of NVRTC 13.0 makes an illegal instruction, whose descriptor nothing writes.
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes)
               : "memory");
#endif
}

// Closes this thread's group of copies. A group may be empty.
__device__ __forceinline__ void copy_async_commit() {
#ifdef TREEATTN_EMULATOR
  emulator::copy_async_commit();
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most PENDING of this thread's groups are unfinished.
template <int PENDING> __device__ __forceinline__ void copy_async_wait() {
#ifdef TREEATTN_EMULATOR
  emulator::copy_async_wait(PENDING);
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// ---- tensor cores; the fragment layouts are those of the PTX manual, "Warp-level matrix instructions"

// Four 8 x 8 matrices of 16-bit numbers. Lane i gives the address of row i % 8 of matrix i / 8 and receives, of each
// matrix, elements [i / 4][2 (i % 4) + 0, 1], or the same of its transpose.
template <bool TRANSPOSED> __device__ __forceinline__ void load_matrices(unsigned (&to)[4], const void *row) {
#ifdef TREEATTN_EMULATOR
  const auto rows = emulator::exchange_addresses(row, 16);
  const int lane = threadIdx.x % 32;
  for (int matrix = 0; matrix < 4; ++matrix) {
    unsigned short element[2];
    for (int j = 0; j < 2; ++j) {
      const int r = TRANSPOSED ? lane % 4 * 2 + j : lane / 4, c = TRANSPOSED ? lane / 4 : lane % 4 * 2 + j;
      element[j] = static_cast<const unsigned short *>(rows[matrix * 8 + r])[c];
    }
    to[matrix] = element[0] | (unsigned)element[1] << 16;
  }
#else
  const unsigned address = (unsigned)__cvta_generic_to_shared(row);
  if constexpr (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
#endif
}

// ---- clusters, from sm_90 on: blocks that run at once and read each other's shared memory

// All threads of all blocks of a cluster come here, and none has ended before: what each wrote is then there for all,
// and what it read of others is read.
__device__ __forceinline__ void meet_cluster() {
#ifdef TREEATTN_EMULATOR
  emulator::meet_cluster();
#elif __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// What lies in block `rank` of the cluster where `own` points to in the shared memory of this one.
template <typename T> __device__ __forceinline__ T load_of_block(const T *own, int rank) {
  static_assert(sizeof(T) == 8 || sizeof(T) == 16, "one load instruction");
#ifdef TREEATTN_EMULATOR
  return *static_cast<const T *>(emulator::map_shared_rank(own, rank));
#else
  T value;
  float *to = reinterpret_cast<float *>(&value);
  unsigned at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((unsigned)__cvta_generic_to_shared(own)), "r"(rank));
  if constexpr (sizeof(T) == 8)
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(at) : "memory");
  else
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "r"(at)
                 : "memory");
  return value;
#endif
}

#endif

#ifdef TREEATTN_EMULATOR
// d += a b, a [16, 16] by rows, b [16, 8] by columns, d [16, 8] in float32.
template <typename T> inline void multiply_matrices(float (&d)[4], const unsigned (&a)[4], const unsigned *b, T) {
  const unsigned mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const auto all = emulator::exchange_words(mine);
  const int lane = threadIdx.x % 32;
  const auto half = [](unsigned word, int upper) { return to_float(T{(unsigned short)(word >> 16 * upper)}); };
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    for (int k = 0; k < 16; ++k) {
      const unsigned left = all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2],
                     right = all[column * 4 + k % 8 / 2][4 + k / 8];
      d[e] = fmaf(half(left, k % 2), half(right, k % 2), d[e]);
    }
  }
}
#elif !defined(__HIP__)
#define MULTIPLY_MATRICES(TYPE, NAME)                                                                                  \
  __device__ __forceinline__ void multiply_matrices(float (&d)[4], const unsigned (&a)[4], const unsigned *b, TYPE) {  \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 "                                        \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                     \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                  \
  }
MULTIPLY_MATRICES(float16, "f16")
MULTIPLY_MATRICES(bfloat16, "bf16")
#undef MULTIPLY_MATRICES
#endif

// A load that stays where it stands: the compiler moves a plain one behind the branch that needs its value, and the
// round trip there is waited for alone.
__device__ __forceinline__ float load_in_order(const float *at) {
#ifdef TREEATTN_PLAIN
  return *at;
#else
  float value;
  asm volatile("ld.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
  return value;
#endif
}

#ifndef __HIP__
// ---- numbers that other GPUs of the node and the host look at

// Whoever reads it by `load_acquire` sees what this thread wrote before, and what it saw of others at a barrier.
__device__ __forceinline__ void store_release(long long *at, long long value) {
#ifdef TREEATTN_EMULATOR
  emulator::store_release(at, value);
#else
  asm volatile("st.release.sys.s64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
#endif
}

__device__ __forceinline__ long long load_acquire(const long long *at) {
#ifdef TREEATTN_EMULATOR
  return emulator::load_acquire(at);
#else
  long long value;
  asm volatile("ld.acquire.sys.s64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
#endif
}

// Of a clock that every block of a device reads alike.
__device__ __forceinline__ long long nanoseconds() {
#ifdef TREEATTN_EMULATOR
  return emulator::nanoseconds();
#else
  long long time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
#endif
}
#endif
