/* Threads that wait for work between calls: starting one costs more than a short attention. */
#ifndef TREEATTN_THREAD_POOL_H
#define TREEATTN_THREAD_POOL_H

#include <stdint.h>

enum { MAX_THREADS = 256 };

/* `worker` is 0 for the calling thread, else 1..threads - 1: never two at a time with one number. */
typedef void item_function(void *context, int64_t item, int worker);

/* work(context, i, ..) for i in 0..items - 1, in any order, by up to `threads` threads of which the caller is one.
 * While another caller has the pool, or after threads could not be started, fewer do all of it. */
void run_items(int threads, int64_t items, item_function *work, void *context);

#endif
