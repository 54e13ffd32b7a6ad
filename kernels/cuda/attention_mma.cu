// attention_mma.cuh with splits that meet in memory, as combine.cuh has it.
#include "attention_mma.cuh"

template <typename T, typename Cache, int HEAD_DIM, int V_DIM, typename Shape, int TILE, int STAGES,
          typename Tokens = AllTokens>
__global__ void __launch_bounds__(Shape::THREADS) attention_mma(const AttentionArguments a) {
  attend_tile<T, Cache, HEAD_DIM, V_DIM, Shape, TILE, STAGES, Tokens, false>(a);
}
