/* Makes a spinning MPI sleep: replaces sched_yield(), which its waiting loops call, by the shortest real sleep.
 * Preloaded by `emulated_cluster --yield`, for more ranks than cores. */
#define _GNU_SOURCE
#include <sched.h>
#include <time.h>

int sched_yield(void) {
  struct timespec shortest = {0, 1};
  nanosleep(&shortest, NULL);
  return 0;
}
