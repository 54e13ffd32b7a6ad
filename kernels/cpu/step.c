/* One rank's part of a reduction as a flat program, run by one call that can be resumed.
 *
 * collectives/executors/lowering.py writes the program. MPI is reached through pointers into the library that the
 * process has loaded, without its header: requests and statuses are bytes that nobody looks into here, and a
 * communicator travels by value in a whole register, whether it is an int or a pointer. */
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

/* START and WAIT are about the messages of a round; PUBLISH and AWAIT about a flag, in memory that
 * several ranks share: the number of the step in which the slots of a round were written. */
enum kind { START, WAIT, PUBLISH, AWAIT, COPY, MERGE };

enum result {
  DONE,
  AGAIN,   /* time is up: the caller may look at signals and at the clock, and call once more */
  FAILED,  /* MPI says so: `code` */
  OVERRUN, /* slots hold a later step already */
};

struct instruction {
  int32_t kind;
  int32_t requests;   /* START, WAIT: how many lie at `into` */
  char *into;         /* PUBLISH, AWAIT: the flag */
  const char *source; /* COPY, MERGE */
  int64_t amount;     /* AWAIT: how many steps ago; COPY: bytes; MERGE: records */
};

struct step {
  int (*startall)(int, void *);
  int (*testall)(int, void *, int *, void *);
  int (*iprobe)(int, int, intptr_t, int *, void *);
  void (*merge)(void *into, const void *other, int64_t records, int64_t width);
  const struct instruction *programs[2]; /* of even and odd steps, which differ in their slots */
  void *statuses;
  intptr_t comm;
  int64_t length, next; /* instructions, and the one to go on with */
  int64_t number;       /* of this step, from 1 */
  int64_t spins;        /* polls before the processor is offered to others */
  int64_t awake;        /* nanoseconds of a wait before it sleeps between polls */
  int64_t width;        /* elements of a record */
  int32_t any_source, any_tag, code;
  int32_t result; /* of the last call */
};

/* While a flag is awaited MPI must make progress too: others may wait for messages that move only then. */
enum { POLLS_PER_PROBE = 64 };

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "flags are shared by processes");

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

/* Asks for lines that the next copies overwrite, of this step and of the one after: others have read them last, and
 * they come while this rank waits anyhow. */
static void ask_for_lines(const struct step *step) {
  enum { LINE = 64, MOST_LINES = 512 };
  for (int64_t n = step->next + 1, lines = 0; n < step->next + step->length; ++n) {
    const struct instruction *i = step->programs[(step->number + n / step->length) & 1] + n % step->length;
    for (int64_t at = 0; i->kind == COPY && at < i->amount && lines < MOST_LINES; at += LINE, ++lines)
#if defined(__x86_64__) || defined(__i386__)
      __asm__ volatile("prefetchw %0" : : "m"(i->into[at])); /* what __builtin_prefetch() makes asks to read */
#else
      __builtin_prefetch(i->into + at, 1);
#endif
  }
}

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* A nap is an eighth of what was waited for, so that it makes the wait longer by no more, and at most this. */
enum { LONGEST_NAP = 1000000 };

/* After a poll in vain: whether to poll again. `nanoseconds` of waiting in vain end a call.
 *
 * Where ranks share processors yielding is not enough. Each yield gives away a whole slice, so that one process
 * that computes takes 3 ms for each lap of the ranks that yield, and a step takes hundreds of laps. */
static int should_spin(const struct step *step, int64_t polls, int64_t *deadline, int64_t nanoseconds) {
  if (nanoseconds && polls < step->spins) {
    relax();
    return 1;
  }
  int64_t time = now();
  if (!*deadline) *deadline = time + nanoseconds;
  if (time >= *deadline) return 0;
  int64_t waited = time - (*deadline - nanoseconds);
  if (waited < step->awake)
    sched_yield();
  else
    nanosleep(&(struct timespec){.tv_nsec = waited / 8 < LONGEST_NAP ? waited / 8 : LONGEST_NAP}, 0);
  return 1;
}

static enum result wait_for_requests(struct step *step, const struct instruction *wait, int64_t nanoseconds) {
  int64_t deadline = 0;
  for (int64_t polls = 0;; ++polls) {
    int complete = 0;
    step->code = step->testall(wait->requests, wait->into, &complete, step->statuses);
    if (step->code) return FAILED;
    if (complete) return DONE;
    if (!should_spin(step, polls, &deadline, nanoseconds)) return AGAIN;
  }
}

static enum result wait_for_flag(struct step *step, const struct instruction *wait, int64_t nanoseconds) {
  const _Atomic int64_t *flag = (const _Atomic int64_t *)wait->into;
  int64_t deadline = 0, wanted = step->number - wait->amount;
  for (int64_t polls = 0;; ++polls) {
    int64_t number = atomic_load_explicit(flag, memory_order_acquire);
    if (number == wanted) return DONE;
    if (number > wanted) return OVERRUN;
    if (!polls) ask_for_lines(step);
    if (step->iprobe && (!nanoseconds || polls % POLLS_PER_PROBE == POLLS_PER_PROBE - 1)) {
      int found;
      step->code = step->iprobe(step->any_source, step->any_tag, step->comm, &found, step->statuses);
      if (step->code) return FAILED;
    }
    if (!should_spin(step, polls, &deadline, nanoseconds)) return AGAIN;
  }
}

static enum result run(struct step *step, const struct instruction *i, int64_t nanoseconds) {
  switch (i->kind) {
  case START:
    step->code = step->startall(i->requests, i->into);
    return step->code ? FAILED : DONE;
  case WAIT:
    return wait_for_requests(step, i, nanoseconds);
  case PUBLISH:
    atomic_store_explicit((_Atomic int64_t *)i->into, step->number, memory_order_release);
    return DONE;
  case AWAIT:
    return wait_for_flag(step, i, nanoseconds);
  case COPY:
    memcpy(i->into, i->source, i->amount);
    return DONE;
  default:
    step->merge(i->into, i->source, i->amount, step->width);
    return DONE;
  }
}

/* A step, or what is left of it. It returns after `nanoseconds` of waiting in vain; 0: after one poll. */
int64_t run_step(struct step *step, int64_t nanoseconds) {
  const struct instruction *program = step->programs[step->number & 1];
  for (; step->next < step->length; ++step->next) {
    step->result = run(step, program + step->next, nanoseconds);
    if (step->result != DONE) return step->result;
  }
  step->next = 0;
  ++step->number;
  return DONE;
}
