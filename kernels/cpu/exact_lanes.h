/* Lanes in the order of memory and products that are fused everywhere: the same bits on every instruction set. */
#ifndef TREEATTN_EXACT_LANES_H
#define TREEATTN_EXACT_LANES_H

#include "simd.h"

enum { DOUBLES = WIDTH / 2 };
typedef double doubles __attribute__((vector_size(DOUBLES * 8), may_alias));
typedef uint64_t words __attribute__((vector_size(DOUBLES * 8), may_alias));

INLINE vector fuse(vector a, vector b, vector c) {
#if SIMD_AVX512 || SIMD_AVX2 || SIMD_NEON
  return multiply_add(a, b, c);
#else
  for (int i = 0; i < WIDTH; ++i) c[i] = fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

INLINE doubles fuse_doubles(doubles a, doubles b, doubles c) {
#if SIMD_AVX512
  return _mm512_fmadd_pd(a, b, c);
#elif SIMD_AVX2
  return _mm256_fmadd_pd(a, b, c);
#else
  for (int i = 0; i < DOUBLES; ++i) c[i] = fma(a[i], b[i], c[i]);
  return c;
#endif
}

/* 16-bit patterns in the upper halves of lanes, something below them cleared. */
INLINE vector_bits upper_halves(const char *from) {
#if SIMD_AVX512
  return (vector_bits)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)), 16);
#elif SIMD_AVX2
  return (vector_bits)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from)), 16);
#else
  uint16_t half[WIDTH];
  memcpy(half, from, sizeof half);
  vector_bits bits;
  for (int i = 0; i < WIDTH; ++i) bits[i] = (uint32_t)half[i] << 16;
  return bits;
#endif
}

/* WIDTH elements. Those of 8 bits by way of float16, as in simd.h. */
INLINE vector load_ordered(enum element_type type, const char *from) {
  if (type == FLOAT32) return load((const float *)from);
  if (type == BFLOAT16) return (vector)upper_halves(from);
  if (type == FLOAT16) {
#if SIMD_AVX512
    return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)from));
#elif SIMD_AVX2
    return _mm256_cvtph_ps(_mm_loadu_si128((const void *)from));
#else
    return widen_half(upper_halves(from));
#endif
  }
  return widen_bytes(type, from) * splat(unit_factor(type));
}

/* The first `count` of them, 0 for the rest; reads nothing beyond them. */
INLINE vector load_first(enum element_type type, const char *from, int64_t count) {
  if (count >= WIDTH) return load_ordered(type, from);
  char padded[WIDTH * 4] = {0};
  if (count > 0) memcpy(padded, from, (size_t)count * element_size(type));
  return load_ordered(type, padded);
}

INLINE doubles load_numbers(const double *from) {
  doubles result;
  memcpy(&result, from, sizeof result);
  return result;
}

INLINE void store_numbers(double *to, doubles value) { memcpy(to, &value, sizeof value); }

INLINE doubles splat_double(double value) { return value - (doubles){0}; }

/* DOUBLES elements. */
INLINE doubles load_widened(enum element_type type, const char *from) {
#if SIMD_AVX512
  if (type == FLOAT32) return _mm512_cvtps_pd(_mm256_loadu_ps((const float *)from));
  if (type == BFLOAT16)
    return _mm512_cvtps_pd(
        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from)), 16)));
  if (type == FLOAT16) return _mm512_cvtps_pd(_mm256_cvtph_ps(_mm_loadu_si128((const void *)from)));
#elif SIMD_AVX2
  if (type == FLOAT32) return _mm256_cvtps_pd(_mm_loadu_ps((const float *)from));
  if (type == BFLOAT16)
    return _mm256_cvtps_pd(
        _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const void *)from)), 16)));
  if (type == FLOAT16) return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64((const void *)from)));
#endif
  float narrow[WIDTH];
  store(narrow, load_first(type, from, DOUBLES));
  doubles result;
  for (int i = 0; i < DOUBLES; ++i) result[i] = narrow[i];
  return result;
}

INLINE vector_bits larger_bits(vector_bits a, vector_bits b) {
#if SIMD_AVX512
  return (vector_bits)_mm512_max_epu32((__m512i)a, (__m512i)b);
#elif SIMD_AVX2
  return (vector_bits)_mm256_max_epu32((__m256i)a, (__m256i)b);
#else
  for (int i = 0; i < WIDTH; ++i) a[i] = a[i] > b[i] ? a[i] : b[i];
  return a;
#endif
}

INLINE uint32_t largest_bits(vector_bits value) {
  uint32_t most = 0;
  for (int i = 0; i < WIDTH; ++i) most = value[i] > most ? value[i] : most;
  return most;
}

#endif
