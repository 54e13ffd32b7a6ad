// Records of rows that share a latent head, by multiply-add, for every type.
//
// Each warp has four rows of the block's sixteen, and each lane of it a share of the channels: elements of q, of the
// numerators, and of UNROLL keys at a time. What a lane holds of a key serves its score and, as the value, its sum; the
// lanes' parts of a score are added by shuffles.
#include "latent_keys.cuh"
#include "rows.cuh"

constexpr int ROWS_OF_WARP = ROWS / WARPS, UNROLL = 2, STAGES = 2;

// Which channels a lane holds: whole vectors of the values, then REST of those that are of the key alone.
template <typename T, int HEAD_DIM, int V_DIM> struct Share {
  static constexpr int ELEMENTS = 16 / sizeof(T);
  static constexpr int VALUES = V_DIM / 32, REST = (HEAD_DIM - V_DIM) / 32, HELD = VALUES + REST;
  static constexpr int TILE = 32 / sizeof(T); // tokens, 18 KiB of them at head_dim 576
  static_assert(V_DIM % (32 * ELEMENTS) == 0, "values are whole vectors of each lane");
  static_assert(HEAD_DIM % (16 * ELEMENTS) == 0 || REST * sizeof(T) <= 16, "and the rest is less than one");

  // The channel of the lane's element i.
  static __device__ __forceinline__ int channel(int lane, int i) {
    return i < VALUES ? (i / ELEMENTS * 32 + lane) * ELEMENTS + i % ELEMENTS : V_DIM + lane * REST + i - VALUES;
  }
};

// The lane's elements of a key, widened.
template <typename S, typename T>
__device__ __forceinline__ void load_key(float (&key)[S::HELD], const T *row, int lane) {
#pragma unroll
  for (int i = 0; i < S::VALUES; i += S::ELEMENTS)
    unpack(*reinterpret_cast<const Vector *>(row + S::channel(lane, i)), key + i, T{});
  const T *rest = row + S::channel(lane, S::VALUES);
  Vector part{};
  if constexpr (S::REST * sizeof(T) % 4 == 0) {
#pragma unroll
    for (int i = 0; i < S::REST * (int)sizeof(T) / 4; ++i) part.word[i] = reinterpret_cast<const unsigned *>(rest)[i];
  } else {
    part.word[0] = *reinterpret_cast<const unsigned short *>(rest);
  }
  float widened[S::ELEMENTS];
  unpack(part, widened, T{});
#pragma unroll
  for (int i = 0; i < S::REST; ++i) key[S::VALUES + i] = widened[i];
}

template <typename T, int HEAD_DIM, int V_DIM, typename Tokens = AllTokens>
__global__ void __launch_bounds__(THREADS, 2) latent_attention(const AttentionArguments a) {
  using S = Share<T, HEAD_DIM, V_DIM>;
  constexpr int TILE = S::TILE, OWN = STAGES * TILE * HEAD_DIM * sizeof(T) / sizeof(float);
  constexpr int NEEDED = Readers<V_DIM, ROWS>::SHARED;
  static_assert(NEEDED >= ROWS * V_DIM, "the numerators reuse the stages");
  __shared__ Floats shared[(NEEDED > OWN ? NEEDED : OWN) / 4];
  __shared__ float maxima[ROWS], denominators[ROWS];
  const KeyStages<T, HEAD_DIM, HEAD_DIM, TILE, STAGES> stages{reinterpret_cast<T *>(shared)};
  const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * ROWS_OF_WARP;
  const Work w = find_work(a, ROWS);
  Tokens tokens(a, w);

  constexpr int PIECES = HEAD_DIM / QueryPiece::ELEMENTS, LOADS = ROWS * PIECES / THREADS;
  static_assert(ROWS * PIECES % THREADS == 0, "as many loads for each thread");
  QueryPiece pieces[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int e = i * THREADS + threadIdx.x;
    pieces[i] = load_query(a, w, ROWS, e / PIECES, e % PIECES * QueryPiece::ELEMENTS);
  }
  tokens.template find<TILE>(a, w);
  if constexpr (Tokens::CHOSEN) {
    tokens.template load_views<ROWS>(a, w);
    __syncthreads(); // the views are there
  }
  const T *k = static_cast<const T *>(a.k) + w.kv_head * a.k_head_stride;
  if constexpr (!Tokens::PAGED) k += w.batch * a.k_batch_stride;
  Tokens ahead = tokens;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) stages.start(a, ahead, k, i);

  // q goes through the last stage, half of the rows at a time; the first turn of the loop fills it after a barrier of
  // its own.
  static_assert(ROWS / 2 * HEAD_DIM * sizeof(float) == TILE * HEAD_DIM * sizeof(T), "half of the rows fill a stage");
  float *room = reinterpret_cast<float *>(stages.row(STAGES - 1, 0)), q[ROWS_OF_WARP][S::HELD], scale = a.scale;
  if constexpr (sizeof(T) == 1) scale *= UNIT<T> * a.k_scales[w.kv_head];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half) __syncthreads(); // the first half is read
#pragma unroll
    for (int i = half * (LOADS / 2); i < half * (LOADS / 2) + LOADS - LOADS / 2; ++i) {
      const int e = i * THREADS + threadIdx.x - half * ROWS / 2 * PIECES;
      if (e < 0 || e >= ROWS / 2 * PIECES) continue;
#pragma unroll
      for (int j = 0; j < QueryPiece::ELEMENTS; ++j)
        room[e * QueryPiece::ELEMENTS + j] = pieces[i].element(a.q_type, j) * scale;
    }
    __syncthreads(); // q is there
    const int row = first_row - half * ROWS / 2;
    if (row < 0 || row >= ROWS / 2) continue;
#pragma unroll
    for (int r = 0; r < ROWS_OF_WARP; ++r)
#pragma unroll
      for (int i = 0; i < S::HELD; ++i) q[r][i] = room[(row + r) * HEAD_DIM + S::channel(lane, i)];
  }
  RowState<S::VALUES> state[ROWS_OF_WARP];
#pragma unroll
  for (int r = 0; r < ROWS_OF_WARP; ++r) {
    state[r].maximum = negative_infinity();
    state[r].denominator = 0.0f;
#pragma unroll
    for (int i = 0; i < S::VALUES; ++i) state[r].numerator[i] = 0.0f;
  }

  int stage = 0;
#pragma unroll 1
  while (tokens.at.start < tokens.at.end) {
    copy_async_wait<STAGES - 2>();
    __syncthreads(); // everyone's copies of this tile are there, and nobody reads the stage that is filled next
    stages.start(a, ahead, k, stages.before(stage));
    const Place here = tokens.at;
    const int count = first_row < w.tile_rows ? min(TILE, here.end - here.start) : 0; // none: rows pad the tile
#pragma unroll 1
    for (int first = 0; first < count; first += UNROLL) {
      float key[UNROLL][S::HELD], scores[ROWS_OF_WARP][UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        load_key<S>(key[u], stages.row(stage, first + u), lane);
#pragma unroll
        for (int r = 0; r < ROWS_OF_WARP; ++r) {
          float sum = 0.0f;
#pragma unroll
          for (int i = 0; i < S::HELD; ++i) sum = fmaf(q[r][i], key[u][i], sum);
          scores[r][u] = sum;
        }
      }
      sum_over_lanes<32>(scores);
      const int token = here.start + first;
      unsigned hidden = 0u;
      if constexpr (Tokens::CHOSEN)
        hidden = choose_scores<1, TILE>(a, tokens.template views<ROWS>(), first_row, here, token, scores);
#pragma unroll
      for (int r = 0; r < ROWS_OF_WARP; ++r) {
        if constexpr (!Tokens::CHOSEN) {
#pragma unroll
          for (int u = 0; u < UNROLL; ++u)
            if (token + u >= here.end) scores[r][u] = negative_infinity();
        }
        take_scores(state[r], scores[r]);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
          if (Tokens::CHOSEN && hidden >> (r * UNROLL + u) & 1u) continue;
#pragma unroll
          for (int i = 0; i < S::VALUES; ++i)
            state[r].numerator[i] = fmaf(scores[r][u], key[u][i], state[r].numerator[i]);
        }
      }
    }
    tokens.template advance<TILE>(a);
    stage = stages.after(stage);
  }

  __syncthreads(); // the stages are free
#pragma unroll
  for (int r = 0; r < ROWS_OF_WARP; ++r) {
#pragma unroll
    for (int i = 0; i < S::VALUES; i += 4) {
      float *four = state[r].numerator + i;
      if constexpr (sizeof(T) == 1) {
#pragma unroll
        for (int j = 0; j < 4; ++j) four[j] *= UNIT<T> * a.v_scales[w.kv_head];
      }
      shared[((first_row + r) * V_DIM + S::channel(lane, i)) / 4] = {four[0], four[1], four[2], four[3]};
    }
    if (lane == 0) {
      maxima[first_row + r] = state[r].maximum;
      denominators[first_row + r] = state[r].denominator;
    }
  }
  __syncthreads(); // all rows are there
  int part;
  const Parts to = find_place<V_DIM, ROWS>(a, w, part);
  const float *numerators = reinterpret_cast<const float *>(shared);
  merge_block<V_DIM, ROWS, 1, V_DIM>(a, w, to, part, numerators, maxima, denominators);
  combine<V_DIM, ROWS>(a, w, shared);
}
