// Records folded and copied by a block, with all that a thread loads under way before it waits for any of it.
#pragma once
#include "state.cuh"

// Sources whose loads are in flight at once, and columns of a record that a thread has: 2, so that the 130 floats of a
// record of 128 channels are one turn of 128 threads.
constexpr int AT_ONCE = 8, COLUMNS = 2;

// Folds `sources` records, left to right, into `own`, which may be one of them; a single one is taken as it is. at:
// source -> its record. The block meets here: nobody writes the own maximum before everyone has read it.
template <class At> __device__ __forceinline__ void fold_record(At at, int sources, float *own, int width) {
  float own_maximum = 0.0f;
#pragma unroll 1
  for (int first = threadIdx.x; first < width; first += COLUMNS * blockDim.x) {
    float maximum = 0.0f, value[COLUMNS] = {};
#pragma unroll 1
    for (int begin = 0; begin < sources; begin += AT_ONCE) {
      float maxima[AT_ONCE], elements[AT_ONCE][COLUMNS];
#pragma unroll
      for (int s = 0; s < AT_ONCE; ++s) {
        if (begin + s >= sources) break;
        const float *record = at(begin + s);
        maxima[s] = load_in_order(record + RECORD_MAX);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          const int column = first + c * (int)blockDim.x;
          elements[s][c] = column < width ? load_in_order(record + column) : 0.0f;
        }
      }
#pragma unroll
      for (int s = 0; s < AT_ONCE; ++s) {
        if (begin + s >= sources) break;
        const bool is_first = begin + s == 0;
        const MergeRule rule = merge_rule(maximum, maxima[s]);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
          value[c] = is_first ? elements[s][c] : merge_element(rule, value[c], elements[s][c]);
        maximum = is_first ? maxima[s] : rule.maximum;
      }
    }
    if (first == RECORD_MAX) own_maximum = maximum;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const int column = first + c * (int)blockDim.x;
      if (column < width && column != RECORD_MAX) own[column] = value[c];
    }
  }
  __syncthreads(); // everyone has read the own maximum, and what `at` reads
  if (threadIdx.x == RECORD_MAX) own[RECORD_MAX] = own_maximum;
}

__device__ __forceinline__ void copy_record(float *into, const float *from, int width) {
  for (int first = threadIdx.x; first < width; first += COLUMNS * blockDim.x) {
    float held[COLUMNS] = {};
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
      if (first + c * (int)blockDim.x < width) held[c] = from[first + c * (int)blockDim.x];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
      if (first + c * (int)blockDim.x < width) into[first + c * (int)blockDim.x] = held[c];
  }
}
