#include "thread_pool.h"

#include <pthread.h>
#include <stdatomic.h>

/* One task at a time; `owner` is held by the caller that gave it. */
static pthread_mutex_t owner = PTHREAD_MUTEX_INITIALIZER;

static struct {
  pthread_mutex_t lock;
  pthread_cond_t start, done;
  int started;    /* threads that exist, the callers' aside */
  int wanted;     /* how many of them take part in this task */
  int busy;       /* how many of those have not finished it */
  uint64_t round; /* which task this is */
  item_function *work;
  void *context;
  int64_t items;
  atomic_llong next;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .start = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static void take_items(int worker) {
  for (int64_t item; (item = atomic_fetch_add(&pool.next, 1)) < pool.items;) pool.work(pool.context, item, worker);
}

static void *serve(void *number) {
  const int worker = (int)(intptr_t)number;
  pthread_mutex_lock(&pool.lock);
  for (uint64_t seen = 0;;) {
    while (pool.round == seen || worker > pool.wanted) {
      seen = pool.round;
      pthread_cond_wait(&pool.start, &pool.lock);
    }
    seen = pool.round;
    pthread_mutex_unlock(&pool.lock);
    take_items(worker);
    pthread_mutex_lock(&pool.lock);
    if (--pool.busy == 0) pthread_cond_signal(&pool.done);
  }
  return NULL;
}

/* Threads do not survive a fork: the child starts anew. */
static void forget_threads(void) {
  pthread_mutex_init(&owner, NULL);
  pthread_mutex_init(&pool.lock, NULL);
  pthread_cond_init(&pool.start, NULL);
  pthread_cond_init(&pool.done, NULL);
  pool.started = 0;
}

static void register_fork(void) { pthread_atfork(NULL, NULL, forget_threads); }

static void start_threads(int wanted) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, register_fork);
  while (pool.started < wanted && pool.started < MAX_THREADS - 1) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)(pool.started + 1))) return;
    pthread_detach(thread);
    pool.started += 1;
  }
}

void run_items(int threads, int64_t items, item_function *work, void *context) {
  if (threads > items) threads = (int)items;
  if (threads <= 1 || pthread_mutex_trylock(&owner)) {
    for (int64_t i = 0; i < items; ++i) work(context, i, 0);
    return;
  }
  pthread_mutex_lock(&pool.lock);
  start_threads(threads - 1);
  pool.work = work;
  pool.context = context;
  pool.items = items;
  atomic_store(&pool.next, 0);
  pool.wanted = pool.busy = threads - 1 < pool.started ? threads - 1 : pool.started;
  pool.round += 1;
  pthread_cond_broadcast(&pool.start);
  pthread_mutex_unlock(&pool.lock);
  take_items(0);
  pthread_mutex_lock(&pool.lock);
  while (pool.busy) pthread_cond_wait(&pool.done, &pool.lock);
  pthread_mutex_unlock(&pool.lock);
  pthread_mutex_unlock(&owner);
}
