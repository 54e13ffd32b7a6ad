// Records of a few rows over many cached tokens, in one pass and one launch: the multiply-add path, for every type.
//
// Each token's key is held by LANES neighbouring lanes, 16 bytes in each; a warp so takes 32 / LANES tokens at once
// and UNROLL of these at a time, to have enough bytes in flight. Each such group of lanes keeps its own online
// softmax; groups meet in shared memory at the end.
#include "attention.cuh"

constexpr int UNROLL = 4;

constexpr int power_of_two_from(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

template <typename T, int HEAD_DIM> struct Layout {
  static constexpr int ELEMENTS = 16 / sizeof(T);                              // of a vector
  static constexpr int VECTORS = HEAD_DIM / ELEMENTS;                          // of a token's key
  static constexpr int LANES = VECTORS < 32 ? power_of_two_from(VECTORS) : 32; // head_dim 80 and 96 leave some idle
  static constexpr int PER_LANE = (VECTORS + LANES - 1) / LANES;
  static constexpr int HELD = PER_LANE * ELEMENTS; // elements in a lane
  static constexpr int TOKENS = 32 / LANES;        // of a warp, at once
  static constexpr int GROUPS = WARPS * TOKENS;    // of lanes, in a block
  static_assert(HEAD_DIM % ELEMENTS == 0, "rows of keys are whole vectors");
  static_assert(GROUPS * HEAD_DIM >= MAX_SPLITS, "the splits' weights reuse the memory of the numerators");
};

__device__ __forceinline__ void unpack(const Vector &v, float *to, float) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = __uint_as_float(v.word[i]);
}

template <typename T> __device__ __forceinline__ void unpack(const Vector &v, float *to, T) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = to_float(T{(unsigned short)(v.word[i] & 0xffffu)});
    to[2 * i + 1] = to_float(T{(unsigned short)(v.word[i] >> 16)});
  }
}

// The vectors of one token that this lane holds; zeros, and nothing read, where there are none.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void load_token(Vector (&to)[Layout<T, HEAD_DIM>::PER_LANE], const T *row, int lane,
                                           bool valid) {
  using L = Layout<T, HEAD_DIM>;
#pragma unroll
  for (int i = 0; i < L::PER_LANE; ++i) {
    const int vector = i * L::LANES + lane;
    to[i] = Vector{{0, 0, 0, 0}};
    if (valid && vector < L::VECTORS) to[i] = load_once(row + vector * L::ELEMENTS);
  }
}

// One row's online softmax in one lane: `numerator` has the elements that the lane holds.
template <int HELD> struct RowState {
  float maximum, denominator, numerator[HELD];
};

// Takes UNROLL scores in: they become weights, and what was summed before is rescaled.
template <int HELD> __device__ __forceinline__ void take_scores(RowState<HELD> &state, float (&scores)[UNROLL]) {
  float top = state.maximum;
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) top = fmaxf(top, scores[u]);
  const float base = top == negative_infinity() ? 0.0f : top; // -inf minus -inf would be NaN
  const float factor = weigh(state.maximum - base);
  state.maximum = top;
  state.denominator *= factor;
#pragma unroll
  for (int i = 0; i < HELD; ++i) state.numerator[i] *= factor;
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    scores[u] = weigh(scores[u] - base);
    state.denominator += scores[u];
  }
}

// Blocks that a multiprocessor should hold. Without it the compiler spills a few registers to make room for a fifth.
constexpr int resident_blocks(int rows) { return rows == 4 ? 2 : 4; }

template <typename T, int HEAD_DIM, int ROWS>
__global__ void __launch_bounds__(THREADS, resident_blocks(ROWS)) partial_attention(const AttentionArguments a) {
  using L = Layout<T, HEAD_DIM>;
  __shared__ float numerators[L::GROUPS * ROWS * HEAD_DIM];
  __shared__ float maxima[L::GROUPS * ROWS], denominators[L::GROUPS * ROWS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % L::LANES;
  const int in_warp = threadIdx.x % 32 / L::LANES, group = warp * L::TOKENS + in_warp;
  const Work w = find_work(a, L::GROUPS * UNROLL);

  float q[ROWS][L::HELD];
  RowState<L::HELD> state[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = w.tile * ROWS + r;
    state[r].maximum = negative_infinity();
    state[r].denominator = 0.0f;
#pragma unroll
    for (int i = 0; i < L::HELD; ++i) {
      const int index = (i / L::ELEMENTS * L::LANES + lane) * L::ELEMENTS + i % L::ELEMENTS;
      q[r][i] = row < w.rows && index < HEAD_DIM ? load_query(a, w, row, index) * a.scale : 0.0f;
      state[r].numerator[i] = 0.0f;
    }
  }

  const T *k = static_cast<const T *>(a.k) + w.batch * a.k_batch_stride + w.kv_head * a.k_head_stride;
  const T *v = static_cast<const T *>(a.v) + w.batch * a.v_batch_stride + w.kv_head * a.v_head_stride;
  for (int start = w.begin + warp * L::TOKENS * UNROLL; start < w.end; start += L::GROUPS * UNROLL) {
    Vector keys[UNROLL][L::PER_LANE], values[UNROLL][L::PER_LANE];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const long long token = start + u * L::TOKENS + in_warp;
      load_token<T, HEAD_DIM>(keys[u], k + token * a.k_token_stride, lane, token < w.end);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const long long token = start + u * L::TOKENS + in_warp;
      load_token<T, HEAD_DIM>(values[u], v + token * a.v_token_stride, lane, token < w.end);
    }

    float scores[ROWS][UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      float key[L::HELD];
#pragma unroll
      for (int i = 0; i < L::PER_LANE; ++i) unpack(keys[u][i], key + i * L::ELEMENTS, T{});
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < L::HELD; ++i) sum = fmaf(q[r][i], key[i], sum);
        scores[r][u] = sum;
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int row = w.tile * ROWS + r;
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        for (int distance = L::LANES / 2; distance > 0; distance /= 2)
          scores[r][u] += __shfl_xor_sync(ALL_LANES, scores[r][u], distance);
        const int token = start + u * L::TOKENS + in_warp;
        const bool seen = token < w.end && (!a.mask || row >= w.rows || visible(a, w, row / w.group, token));
        if (!seen) scores[r][u] = negative_infinity();
      }
      take_scores(state[r], scores[r]);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      float value[L::HELD];
#pragma unroll
      for (int i = 0; i < L::PER_LANE; ++i) unpack(values[u][i], value + i * L::ELEMENTS, T{});
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int i = 0; i < L::HELD; ++i) state[r].numerator[i] = fmaf(scores[r][u], value[i], state[r].numerator[i]);
    }
  }

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int i = 0; i < L::HELD; ++i) {
      const int index = (i / L::ELEMENTS * L::LANES + lane) * L::ELEMENTS + i % L::ELEMENTS;
      if (index < HEAD_DIM) numerators[(group * ROWS + r) * HEAD_DIM + index] = state[r].numerator[i];
    }
    if (lane == 0) {
      maxima[group * ROWS + r] = state[r].maximum;
      denominators[group * ROWS + r] = state[r].denominator;
    }
  }
  __syncthreads(); // the groups' states are there
  merge_block<HEAD_DIM, ROWS, L::GROUPS>(a, w, numerators, maxima, denominators);
  combine_splits<HEAD_DIM, ROWS>(a, w, numerators);
}
