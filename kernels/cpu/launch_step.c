/* A step on a GPU as one call of the host: kernels and graphs that were prepared, queued through the driver.
 *
 * The driver is reached through pointers into the library that the process has loaded, without its header: kernels,
 * graphs and streams are pointers that nobody looks behind. */
#include <stdint.h>

/* Without a kernel: an instantiated graph. */
struct launch {
  void *kernel, *graph;
  void *arguments; /* the kernel's only one, a structure: it is read when the kernel is queued */
  uint32_t grid[3], block[3];
  int64_t shared_bytes;
};

struct launch_step {
  int (*launch_kernel)(void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **arguments,
                       void **extra);             /* cuLaunchKernel */
  int (*launch_graph)(void *graph, void *stream); /* cuGraphLaunch */
  const struct launch *launches;
  int64_t count;
};

/* How many were queued: all, or those before the first that the driver refuses. */
int64_t launch_step(const struct launch_step *s, void *stream) {
  int64_t queued = 0;
  for (; queued < s->count; ++queued) {
    const struct launch *l = s->launches + queued;
    void *arguments[] = {l->arguments};
    int refused = l->kernel ? s->launch_kernel(l->kernel, l->grid[0], l->grid[1], l->grid[2], l->block[0], l->block[1],
                                               l->block[2], (unsigned)l->shared_bytes, stream, arguments, 0)
                            : s->launch_graph(l->graph, stream);
    if (refused) break;
  }
  return queued;
}
