// attention_mma.cuh with splits that are the blocks of a cluster, as cluster.cuh has it: for few rows of few heads over
// few tokens, where what comes behind the last token is much of a step.
#include "attention_mma.cuh"

template <typename T, typename Cache, int HEAD_DIM, int V_DIM, typename Shape, int TILE, int STAGES,
          typename Tokens = AllTokens>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(Shape::THREADS)
    attention_cluster(const AttentionArguments a) {
  attend_tile<T, Cache, HEAD_DIM, V_DIM, Shape, TILE, STAGES, Tokens, true>(a);
}
