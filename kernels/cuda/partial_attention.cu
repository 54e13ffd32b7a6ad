// Records of a few rows over many cached tokens, in one pass and one launch: the multiply-add path, for every type.
//
// Each token's key is held by LANES neighbouring lanes, 16 bytes in each; a warp so takes 32 / LANES tokens at once
// and UNROLL of these at a time, to have enough bytes in flight. Each such group of lanes keeps its own online
// softmax; groups meet in shared memory at the end.
//
// Memory never waits for arithmetic: the next keys are asked for as soon as these became scores, the next values as
// soon as these are summed, and the first of both before q is waited for.
#include "combine.cuh"
#include "rows.cuh"

constexpr int UNROLL = 4;

template <typename T, int HEAD_DIM> struct Layout {
  static constexpr int ELEMENTS = 16 / sizeof(T);                              // of a vector
  static constexpr int VECTORS = HEAD_DIM / ELEMENTS;                          // of a token's key
  static constexpr int LANES = VECTORS < 32 ? power_of_two_from(VECTORS) : 32; // head_dim 80 and 96 leave some idle
  static constexpr int PER_LANE = (VECTORS + LANES - 1) / LANES;
  static constexpr int HELD = PER_LANE * ELEMENTS; // elements in a lane
  static constexpr int TOKENS = 32 / LANES;        // of a warp, at once
  static constexpr int GROUPS = WARPS * TOKENS;    // of lanes, in a block
  static constexpr int STEP = GROUPS * UNROLL;     // tokens that a block takes at a time
  static_assert(HEAD_DIM % ELEMENTS == 0, "rows of keys are whole vectors");
};

// Keys or values as a lane reads them: the row of its first token, of a cache in pages where all pages begin.
template <typename T, int HEAD_DIM, typename Tokens> struct Rows {
  using L = Layout<T, HEAD_DIM>;
  const Strided &in;
  const T *first;

  __device__ __forceinline__ Rows(const Strided &in, const Work &w, int token)
      : in(in), first(static_cast<const T *>(in.data) + w.kv_head * in.head_stride) {
    if constexpr (!Tokens::PAGED) first += w.batch * in.batch_stride + token * in.row_stride;
  }

  __device__ __forceinline__ void advance(int tokens) {
    if constexpr (!Tokens::PAGED) first += tokens * in.row_stride;
  }

  // The vectors that this lane holds of UNROLL tokens, `token` and each other TOKENS further on. Zeros, and nothing
  // read, where there are none.
  __device__ __forceinline__ void load(Vector (&to)[UNROLL][L::PER_LANE], const AttentionArguments &a,
                                       const int (&pages)[UNROLL], int lane, int token, int end) const {
    const T *row = first;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if constexpr (Tokens::PAGED) row = first + row_in_page(a, pages[u], token + u * L::TOKENS, in);
      const bool valid = Tokens::PAGED ? pages[u] >= 0 : token + u * L::TOKENS < end;
#pragma unroll
      for (int i = 0; i < L::PER_LANE; ++i) {
        const int vector = i * L::LANES + lane;
        to[u][i] = load_once(row + vector * L::ELEMENTS, valid && vector < L::VECTORS);
      }
      if constexpr (!Tokens::PAGED) row += L::TOKENS * in.row_stride;
    }
  }
};

template <int TOKENS>
__device__ __forceinline__ void find_pages(const AttentionArguments &a, int (&pages)[UNROLL], int token, int end) {
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) pages[u] = token + u * TOKENS < end ? find_page(a, token + u * TOKENS) : -1;
}

// Blocks that a multiprocessor should hold: as many as leave the compiler enough registers not to spill any.
// vectors: that a lane holds of a row.
constexpr int resident_blocks(int rows, int vectors, bool narrow, bool chosen) {
  const int most = rows == 4 ? 3 : rows == 2 ? 4 : 5;
  return vectors > 2 ? 2 : most - (vectors > 1 || narrow ? 1 : 0) - (chosen ? 1 : 0);
}

template <typename T, int HEAD_DIM, int ROWS, typename Tokens = AllTokens>
__global__ void __launch_bounds__(THREADS, resident_blocks(ROWS, Layout<T, HEAD_DIM>::PER_LANE, sizeof(T) == 1,
                                                           Tokens::CHOSEN || Tokens::PAGED))
    partial_attention(const AttentionArguments a) {
  using L = Layout<T, HEAD_DIM>;
  constexpr int NEEDED = Readers<HEAD_DIM, ROWS>::SHARED, OWN = L::GROUPS * ROWS * HEAD_DIM;
  __shared__ Floats shared[(NEEDED > OWN ? NEEDED : OWN) / 4], queries[ROWS * HEAD_DIM / 4];
  __shared__ float maxima[L::GROUPS * ROWS], denominators[L::GROUPS * ROWS];
  float *numerators = reinterpret_cast<float *>(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % L::LANES;
  const int in_warp = threadIdx.x % 32 / L::LANES, group = warp * L::TOKENS + in_warp;
  const Work w = find_work(a, ROWS);
  Tokens tokens(a, w);

  constexpr int PIECES = HEAD_DIM / QueryPiece::ELEMENTS; // of a row
  static_assert(ROWS * PIECES <= THREADS, "one for each thread");
  const int piece_row = threadIdx.x / PIECES, piece_index = threadIdx.x % PIECES * QueryPiece::ELEMENTS;
  const QueryPiece piece = load_query(a, w, ROWS, piece_row, piece_index);

  tokens.template find<L::STEP>(a, w);
  int token = tokens.at.start + warp * L::TOKENS * UNROLL + in_warp; // the first of this lane's UNROLL
  Rows<T, HEAD_DIM, Tokens> k(a.k, w, token), v(a.v, w, token);
  Vector keys[UNROLL][L::PER_LANE], values[UNROLL][L::PER_LANE];
  int pages[UNROLL];
  if constexpr (Tokens::PAGED) find_pages<L::TOKENS>(a, pages, token, tokens.at.end);
  k.load(keys, a, pages, lane, token, tokens.at.end);
  v.load(values, a, pages, lane, token, tokens.at.end);

  if (piece_row < ROWS) {
    float *to = reinterpret_cast<float *>(queries) + piece_row * HEAD_DIM + piece_index, scale = a.scale;
    if constexpr (sizeof(T) == 1) scale *= UNIT<T> * a.k_scales[w.kv_head];
#pragma unroll
    for (int i = 0; i < QueryPiece::ELEMENTS; ++i) to[i] = piece.element(a.q_type, i) * scale;
  }
  if constexpr (Tokens::CHOSEN) tokens.template load_views<ROWS>(a, w);
  __syncthreads(); // q is there
  float q[ROWS][L::HELD];
  RowState<L::HELD> state[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    state[r].maximum = negative_infinity();
    state[r].denominator = 0.0f;
#pragma unroll
    for (int i = 0; i < L::HELD; i += 4) {
      const int index = (i / L::ELEMENTS * L::LANES + lane) * L::ELEMENTS + i % L::ELEMENTS;
      const Floats four = index < HEAD_DIM ? queries[(r * HEAD_DIM + index) / 4] : Floats{};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        q[r][i + j] = four.element[j];
        state[r].numerator[i + j] = 0.0f;
      }
    }
  }

#pragma unroll 1
  while (tokens.at.start < tokens.at.end) { // as often in all warps: shuffles need no care
    const TileRange here = tokens.at;
    tokens.template advance<L::STEP>(a);
    const int moved = tokens.at.start - here.start;
    if constexpr (Tokens::PAGED) find_pages<L::TOKENS>(a, pages, token + moved, tokens.at.end);
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
    k.advance(moved);
    k.load(keys, a, pages, lane, token + moved, tokens.at.end);
    sum_over_lanes<L::LANES>(scores);
    unsigned hidden = 0u;
    if constexpr (Tokens::CHOSEN)
      hidden = choose_scores<L::TOKENS, L::STEP>(a, tokens.template views<ROWS>(), 0, here, token, scores);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if constexpr (!Tokens::CHOSEN) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
          if (token + u * L::TOKENS >= here.end) scores[r][u] = negative_infinity();
      }
      online_softmax(state[r], scores[r]);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      float value[L::HELD];
#pragma unroll
      for (int i = 0; i < L::PER_LANE; ++i) unpack(values[u][i], value + i * L::ELEMENTS, T{});
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if (Tokens::CHOSEN && hidden >> (r * UNROLL + u) & 1u) continue;
#pragma unroll
        for (int i = 0; i < L::HELD; ++i) state[r].numerator[i] = fmaf(scores[r][u], value[i], state[r].numerator[i]);
      }
    }
    token += moved;
    v.advance(moved);
    v.load(values, a, pages, lane, token, tokens.at.end);
  }

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int i = 0; i < L::HELD; i += 4) {
      const int index = (i / L::ELEMENTS * L::LANES + lane) * L::ELEMENTS + i % L::ELEMENTS;
      float *four = state[r].numerator + i;
      if constexpr (sizeof(T) == 1) {
#pragma unroll
        for (int j = 0; j < 4; ++j) four[j] *= UNIT<T> * a.v_scales[w.kv_head];
      }
      if (index < HEAD_DIM) shared[((group * ROWS + r) * HEAD_DIM + index) / 4] = {four[0], four[1], four[2], four[3]};
    }
    if (lane == 0) {
      maxima[group * ROWS + r] = state[r].maximum;
      denominators[group * ROWS + r] = state[r].denominator;
    }
  }
  __syncthreads(); // the groups' states are there
  int part;
  const Parts to = find_part<HEAD_DIM, ROWS>(a, w, part);
  merge_block<HEAD_DIM, ROWS, L::GROUPS, HEAD_DIM>(a, w, to, part, numerators, maxima, denominators);
  combine<HEAD_DIM, ROWS>(a, w, shared);
}
