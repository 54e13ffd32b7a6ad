// The entry points of the CUDA driver that a step on a GPU is launched through, which execute what they are given
// before they return.
#include <stddef.h>

// In place of a CUfunction: a kernel as EXPORT_KERNEL makes it, and what an EmulatorRuntime knows of it.
struct kernel {
  int (*run)(const unsigned *grid, const unsigned *block, size_t shared_bytes, void **arguments, unsigned seed,
             int workers, char *message, size_t message_bytes);
  unsigned seed;
  int workers; // 0: as many as the grid is wide, since its blocks wait for others
  long long *launches;
};

// In place of a CUgraphExec.
struct graph {
  void (*launch)(void);
};

enum { SUCCESS = 0, INVALID_VALUE = 1, LAUNCH_FAILED = 719 };

int cuLaunchKernel(const struct kernel *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **arguments,
                   void **extra) {
  const unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
  char message[512];
  if (!grid_x || !grid_y || !grid_z || grid_y > 65535 || grid_z > 65535 || extra) return INVALID_VALUE;
  ++*kernel->launches;
  const int workers = kernel->workers ? kernel->workers : (int)grid_x;
  return kernel->run(grid, block, shared_bytes, arguments, kernel->seed, workers, message, sizeof message)
             ? LAUNCH_FAILED
             : SUCCESS;
}

int cuGraphLaunch(const struct graph *graph, void *stream) {
  graph->launch();
  return SUCCESS;
}
