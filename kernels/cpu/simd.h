/* One vector type and the few operations that the attention kernel needs, for each instruction set.
 *
 * Arithmetic is written with the vector extensions of GCC and Clang, so the portable build needs
 * nothing else. Instruction sets differ in the width, in the loads of 16-bit numbers and in fma.
 * Which one is used follows from the -m flags of the build (treeattn/backends/compile.py). */
#ifndef TREEATTN_SIMD_H
#define TREEATTN_SIMD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "exponential.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#define SIMD_AVX512 1
#define WIDTH 16
#define REGISTERS 32
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define SIMD_AVX2 1
#define WIDTH 8
#define REGISTERS 16
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define SIMD_NEON 1
#define WIDTH 4
#define REGISTERS 32
#else
#define WIDTH 4
#define REGISTERS 16
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vector __attribute__((vector_size(WIDTH * 4), may_alias));
typedef int32_t vector_int __attribute__((vector_size(WIDTH * 4), may_alias));
typedef uint32_t vector_bits __attribute__((vector_size(WIDTH * 4), may_alias));

/* Element types of q, k and v: the numbers that treeattn/backends/cpu/attention.py passes. Floats of 8 bits: k, v
 * only. */
enum element_type { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2, E4M3FN = 3, E5M2 = 4 };

#define FOR_TYPES(MACRO) MACRO(FLOAT32) MACRO(FLOAT16) MACRO(BFLOAT16) MACRO(E4M3FN) MACRO(E5M2)

INLINE size_t element_size(enum element_type type) { return type == FLOAT32 ? 4 : type <= BFLOAT16 ? 2 : 1; }

/* What a loaded element has to be multiplied with: e4m3fn is read as float16, whose exponents count from elsewhere. */
INLINE float unit_factor(enum element_type type) { return type == E4M3FN ? 256.0f : 1.0f; }

INLINE vector splat(float value) { return value - (vector){0}; }

INLINE vector load(const float *from) {
  vector result;
  memcpy(&result, from, sizeof result);
  return result;
}

/* Loaded once, where a compiler would load it anew for each use. */
INLINE vector in_register(vector value) {
#if SIMD_AVX512
  __asm__("" : "+v"(value));
#elif SIMD_AVX2
  __asm__("" : "+x"(value));
#endif
  return value;
}

INLINE void store(float *to, vector value) { memcpy(to, &value, sizeof value); }

/* a * b + c; fused where the instruction set can. */
INLINE vector multiply_add(vector a, vector b, vector c) {
#if SIMD_AVX512
  return _mm512_fmadd_ps(a, b, c);
#elif SIMD_AVX2
  return _mm256_fmadd_ps(a, b, c);
#elif SIMD_NEON
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

/* The larger of two numbers; b where one of them is NaN. */
INLINE vector larger(vector a, vector b) {
#if SIMD_AVX512
  return _mm512_max_ps(a, b);
#elif SIMD_AVX2
  return _mm256_max_ps(a, b);
#else
  vector_int greater = a > b;
  return (vector)(((vector_int)a & greater) | ((vector_int)b & ~greater));
#endif
}

/* The largest lane, NaN aside. */
INLINE float largest_lane(vector value) {
  float lane[WIDTH];
  store(lane, value);
  for (int half = WIDTH / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
  return lane[0];
}

INLINE float sum_lanes(vector value) {
  float lane[WIDTH];
  store(lane, value);
  for (int half = WIDTH / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

/* Whether a[i] > b[i] for any lane; NaN is not greater. */
INLINE int any_greater(vector a, vector b) {
#if SIMD_AVX512
  return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0;
#elif SIMD_AVX2
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
#elif SIMD_NEON
  return vmaxvq_u32(vcgtq_f32(a, b)) != 0;
#else
  int any = 0;
  for (int i = 0; i < WIDTH; ++i) any |= a[i] > b[i];
  return any;
#endif
}

/* One step of sum_each: lanes whose index has the bit `distance` clear take a[i] + a[i + distance],
 * the others b[i] + b[i - distance]. */
#if SIMD_AVX512
INLINE vector fold_lanes(vector a, vector b, int distance) {
  __m512 crossed, straight;
  if (distance == 8) {
    crossed = _mm512_shuffle_f32x4(a, b, 0x4e);
    straight = _mm512_mask_blend_ps(0xff00, a, b);
  } else if (distance == 4) {
    const __m512i index = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    crossed = _mm512_permutex2var_ps(a, index, b);
    straight = _mm512_mask_blend_ps(0xf0f0, a, b);
  } else if (distance == 2) {
    crossed = _mm512_shuffle_ps(a, b, 0x4e);
    straight = _mm512_mask_blend_ps(0xcccc, a, b);
  } else {
    crossed = _mm512_permute_ps(_mm512_mask_blend_ps(0xaaaa, b, a), 0xb1);
    straight = _mm512_mask_blend_ps(0xaaaa, a, b);
  }
  return crossed + straight;
}
#elif SIMD_AVX2
INLINE vector fold_lanes(vector a, vector b, int distance) {
  if (distance == 4) return _mm256_permute2f128_ps(a, b, 0x21) + _mm256_blend_ps(a, b, 0xf0);
  if (distance == 2) return _mm256_shuffle_ps(a, b, 0x4e) + _mm256_blend_ps(a, b, 0xcc);
  return _mm256_permute_ps(_mm256_blend_ps(b, a, 0xaa), 0xb1) + _mm256_blend_ps(a, b, 0xaa);
}
#else
INLINE vector fold_lanes(vector a, vector b, int distance) {
  vector result;
  for (int i = 0; i < WIDTH; ++i) result[i] = i & distance ? b[i] + b[i - distance] : a[i] + a[i + distance];
  return result;
}
#endif

/* Lane i of the result is the sum of the lanes of value[i], folded half by half. Overwrites value[WIDTH]. */
INLINE vector sum_by_halves(vector *value) {
  /* Written out: compilers do not unroll a loop over the distance, and then keep no sum in a register. */
  if (WIDTH >= 16)
    for (int i = 0; i < 8; ++i) value[i] = fold_lanes(value[i], value[i + 8], 8);
  if (WIDTH >= 8)
    for (int i = 0; i < 4; ++i) value[i] = fold_lanes(value[i], value[i + 4], 4);
  for (int i = 0; i < 2; ++i) value[i] = fold_lanes(value[i], value[i + 2], 2);
  return fold_lanes(value[0], value[1], 1);
}

/* The same sums, in whichever order is fastest. */
INLINE vector sum_each(vector *value) {
#if SIMD_NEON
  return vpaddq_f32(vpaddq_f32(value[0], value[1]), vpaddq_f32(value[2], value[3]));
#else
  return sum_by_halves(value);
#endif
}

/* Two vectors of consecutive elements are a *unit*: what one load of 16-bit elements brings. It comes apart most
 * cheaply as elements with even and with odd index, unless an instruction widens neighbours. That is then the order
 * of a unit's lanes: a dot product does not mind, and interleave() undoes it at the end. */
enum { UNIT = 2 * WIDTH };
typedef struct {
  vector first, second;
} unit;

#if SIMD_AVX512 || SIMD_AVX2 || SIMD_NEON
enum { CAN_WIDEN_HALF = 1 };
#else
enum { CAN_WIDEN_HALF = 0 };
#endif

/* What a load_float8 below takes apart in place. */
#if SIMD_AVX512
enum { SPLITS_E4M3FN = 1, SPLITS_E5M2 = 1 };
#elif SIMD_AVX2
enum { SPLITS_E4M3FN = 0, SPLITS_E5M2 = 1 };
#else
enum { SPLITS_E4M3FN = 0, SPLITS_E5M2 = 0 };
#endif

INLINE int is_split(enum element_type type) {
  if (type > BFLOAT16) return type == E5M2 ? SPLITS_E5M2 : SPLITS_E4M3FN;
  return type == BFLOAT16 || (type == FLOAT16 && !CAN_WIDEN_HALF);
}

/* A split unit to memory order, and back. */
INLINE unit interleave(unit u) {
  float from[UNIT], to[UNIT];
  store(from, u.first);
  store(from + WIDTH, u.second);
  for (int i = 0; i < WIDTH; ++i) {
    to[2 * i] = from[i];
    to[2 * i + 1] = from[WIDTH + i];
  }
  return (unit){load(to), load(to + WIDTH)};
}

INLINE unit split(unit u) {
  float from[UNIT], to[UNIT];
  store(from, u.first);
  store(from + WIDTH, u.second);
  for (int i = 0; i < WIDTH; ++i) {
    to[i] = from[2 * i];
    to[WIDTH + i] = from[2 * i + 1];
  }
  return (unit){load(to), load(to + WIDTH)};
}

typedef struct {
  vector_bits even, odd;
} halves;

/* 32-bit words of two 16-bit patterns each: every pattern in the upper half of a lane, 0 below it. */
INLINE halves split_words(vector_bits words) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  return (halves){words << 16, words & 0xffff0000u};
#else
  return (halves){words & 0xffff0000u, words << 16};
#endif
}

INLINE unit split_bfloat16(vector_bits words) {
  const halves h = split_words(words);
  return (unit){(vector)h.even, (vector)h.odd};
}

/* float16 in the upper half of each lane to float32, subnormal numbers, infinities and NaN included. */
INLINE vector widen_half(vector_bits upper) {
  const vector_bits sign = upper & 0x80000000u, magnitude = (upper & 0x7fff0000u) >> 3;
  const vector_bits subnormal = (vector_bits)((vector_int)magnitude < (1 << 23));
  const vector_bits special = (vector_bits)((vector_int)magnitude > (31 << 23) - 1);
  const vector_bits normal = magnitude + (112u << 23) + (special & (112u << 23));
  const vector scaled = (vector)(magnitude + (113u << 23)) - 0x1p-14f;
  return (vector)(sign | (normal & ~subnormal) | ((vector_bits)scaled & subnormal));
}

/* Floats of 8 bits, one by one. */
INLINE vector widen_bytes(enum element_type type, const char *from) {
  vector_bits upper = {0};
  for (int i = 0; i < WIDTH; ++i) {
    const uint32_t byte = (uint8_t)from[i], magnitude = byte & 0x7f;
    const uint32_t nan = type == E4M3FN && magnitude == 0x7f ? 0x7fff0000u : 0;
    upper[i] = (byte & 0x80) << 24 | magnitude << (type == E5M2 ? 24 : 23) | nan;
  }
  return widen_half(upper);
}

INLINE unit split_float16(vector_bits words) {
  const halves h = split_words(words);
  return (unit){widen_half(h.even), widen_half(h.odd)};
}

INLINE unit load_float16(const char *from) {
#if SIMD_AVX512
  return (unit){_mm512_cvtph_ps(_mm256_loadu_si256((const void *)from)),
                _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(from + 2 * WIDTH)))};
#elif SIMD_AVX2
  return (unit){_mm256_cvtph_ps(_mm_loadu_si128((const void *)from)),
                _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from + 2 * WIDTH)))};
#elif SIMD_NEON
  const uint16x8_t both = vreinterpretq_u16_u8(vld1q_u8((const uint8_t *)from));
  return (unit){vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(both))),
                vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(both)))};
#else
  vector_bits words;
  memcpy(&words, from, sizeof words);
  return split_float16(words);
#endif
}

INLINE unit load_bfloat16(const char *from) {
  vector_bits words;
  memcpy(&words, from, sizeof words);
  return split_bfloat16(words);
}

/* Elements of 8 bits, by way of float16. e5m2 is its upper half. e4m3fn has the sign there too and the rest one place
 * lower, where shifting leaves a copy of the sign to clear; 0x7f of either sign is NaN, but in float16 a number. Words
 * of two come apart in place, as those of bfloat16 do, where that takes fewer instructions than a move across lanes.
 *
 * On x86 a signed byte of e4m3fn times 128 is in its place; with AVX-512 that product takes words apart too, the other
 * byte times 0. The copy of the sign lies where the exponent's upper bit belongs. One more in the last place changes it
 * for NaN alone, whose other bits are all set: copy ^ changed copy is that upper bit, for numbers and for NaN. */
#if SIMD_AVX512
INLINE unit load_float8(enum element_type type, const char *from) {
  const __m256i bytes = _mm256_loadu_si256((const void *)from);
  __m256i even, odd;
  if (type == E5M2) {
    even = _mm256_slli_epi16(bytes, 8), odd = _mm256_and_si256(bytes, _mm256_set1_epi16((short)0xff00));
  } else {
    const __m256i one = _mm256_set1_epi16(0x80), copy = _mm256_set1_epi16(0x4000);
    even = _mm256_maddubs_epi16(one, bytes), odd = _mm256_maddubs_epi16(_mm256_slli_epi16(one, 8), bytes);
    even = _mm256_ternarylogic_epi32(even, _mm256_add_epi16(even, one), copy, 0x78); /* a ^ (b & c) */
    odd = _mm256_ternarylogic_epi32(odd, _mm256_add_epi16(odd, one), copy, 0x78);
  }
  return (unit){_mm512_cvtph_ps(even), _mm512_cvtph_ps(odd)};
}
#elif SIMD_AVX2
INLINE unit load_float8(enum element_type type, const char *from) {
  const __m128i bytes = _mm_loadu_si128((const void *)from);
  if (type == E5M2)
    return (unit){_mm256_cvtph_ps(_mm_slli_epi16(bytes, 8)),
                  _mm256_cvtph_ps(_mm_and_si128(bytes, _mm_set1_epi16((short)0xff00)))};
  const __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  const __m256i above = _mm256_add_epi16(half, _mm256_set1_epi16(0x80));
  const __m256i whole = _mm256_xor_si256(half, _mm256_and_si256(above, _mm256_set1_epi16(0x4000)));
  return (unit){_mm256_cvtph_ps(_mm256_castsi256_si128(whole)), _mm256_cvtph_ps(_mm256_extracti128_si256(whole, 1))};
}
#elif SIMD_NEON
INLINE unit load_float8(enum element_type type, const char *from) {
  const int16x8_t words = vmovl_s8(vld1_s8((const int8_t *)from));
  uint16x8_t half = vreinterpretq_u16_s16(type == E5M2 ? vshlq_n_s16(words, 8) : vshlq_n_s16(words, 7));
  if (type == E4M3FN) {
    const uint16x8_t magnitude = vdupq_n_u16(0x3f80), nan = vceqq_u16(vandq_u16(half, magnitude), magnitude);
    half = vorrq_u16(vandq_u16(half, vdupq_n_u16(0xbfff)), nan);
  }
  return (unit){vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(half))),
                vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(half)))};
}
#else
INLINE unit load_float8(enum element_type type, const char *from) {
  return (unit){widen_bytes(type, from), widen_bytes(type, from + WIDTH)};
}
#endif

INLINE unit load_unit(enum element_type type, const char *from) {
  if (type == BFLOAT16) return load_bfloat16(from);
  if (type == FLOAT16) return load_float16(from);
  if (type > BFLOAT16) return load_float8(type, from);
  return (unit){load((const float *)from), load((const float *)from + WIDTH)};
}

/* The first `count` elements of a unit, 0 for the rest; reads nothing beyond them. */
INLINE unit load_part(enum element_type type, const char *from, int count) {
#if SIMD_AVX512
  const uint32_t mask = (1u << count) - 1;
  if (type == FLOAT32) return (unit){_mm512_maskz_loadu_ps(mask, from), _mm512_maskz_loadu_ps(mask >> 16, from + 64)};
  if (type > BFLOAT16) {
    char padded[UNIT];
    _mm256_storeu_si256((void *)padded, _mm256_maskz_loadu_epi8(mask, from));
    return load_unit(type, padded);
  }
  const __m512i bits = _mm512_maskz_loadu_epi16(mask, from);
  if (type == BFLOAT16) return split_bfloat16((vector_bits)bits);
  return (unit){_mm512_cvtph_ps(_mm512_castsi512_si256(bits)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1))};
#else
  char padded[UNIT * 4] = {0};
  const size_t bytes = (size_t)count * element_size(type);
#pragma GCC unroll 8
  for (size_t some = UNIT * 2; some; some /= 2) { /* sizes known when this is compiled: a call would spill registers */
    const size_t at = bytes & ~(2 * some - 1);
    if (bytes & some) memcpy(padded + at, from + at, some);
  }
  return load_unit(type, padded);
#endif
}

/* exp for lanes <= 0; 0 far down, NaN for NaN. The scalar twin is in exponential.h. */
INLINE vector exponential_lanes(vector x) {
  vector shifted = multiply_add(x, splat(EXP_LOG2_E), splat(EXP_ROUND_TO_INTEGER));
  vector power = shifted - EXP_ROUND_TO_INTEGER;
  vector fraction = multiply_add(power, splat(-EXP_LN2_HIGH), x);
  fraction = multiply_add(power, splat(-EXP_LN2_LOW), fraction);
  vector value = splat(exp_polynomial[0]);
  for (int i = 1; i <= EXP_DEGREE; ++i) value = multiply_add(value, fraction, splat(exp_polynomial[i]));
  value *= (vector)(((vector_bits)shifted + 127u) << 23);
  vector_int vanishes = x < EXP_LOWEST; /* false for NaN, which stays */
  return (vector)((vector_int)value & ~vanishes);
}

#endif
