/* Preloaded before MPI: tells of every call that may wait for other ranks, before it is made. */
#include <dlfcn.h>
#include <stddef.h>

static void (*told)(const char *call);

void tell(void (*listener)(const char *call)) { told = listener; }

static void *of_mpi(const char *name) {
  void *library = dlopen("libmpi.so.12", RTLD_LAZY | RTLD_NOLOAD); /* MPICH's; the other is Open MPI's */
  if (library == NULL) library = dlopen("libmpi.so.40", RTLD_LAZY | RTLD_NOLOAD);
  return dlsym(library, name);
}

/* All arguments are integers or pointers, at most ten of them; those that a call does not have are not read. */
#define WAITS(NAME)                                                                                                    \
  int MPI_##NAME(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j) {                     \
    static int (*real)(long, long, long, long, long, long, long, long, long, long);                                    \
    if (real == NULL)                                                                                                  \
      real = (int (*)(long, long, long, long, long, long, long, long, long, long))of_mpi("PMPI_" #NAME);               \
    if (told != NULL) told(#NAME);                                                                                     \
    return real(a, b, c, d, e, f, g, h, i, j);                                                                         \
  }

/* And with counts that may be large. */
#define COUNTS(NAME) WAITS(NAME) WAITS(NAME##_c)

/* clang-format off */
COUNTS(Allgather) COUNTS(Allgatherv) COUNTS(Allreduce) COUNTS(Alltoall) COUNTS(Alltoallv) COUNTS(Alltoallw)
COUNTS(Bcast) COUNTS(Exscan) COUNTS(Gather) COUNTS(Gatherv) COUNTS(Reduce) COUNTS(Reduce_scatter)
COUNTS(Reduce_scatter_block) COUNTS(Scan) COUNTS(Scatter) COUNTS(Scatterv) WAITS(Barrier)
WAITS(Comm_create) WAITS(Comm_create_group) WAITS(Comm_dup) WAITS(Comm_free) WAITS(Comm_split)
WAITS(Comm_split_type) COUNTS(Win_allocate_shared) COUNTS(Win_create) WAITS(Win_fence) WAITS(Win_free)
WAITS(Mprobe) WAITS(Probe) COUNTS(Recv) COUNTS(Mrecv) COUNTS(Send) COUNTS(Sendrecv) COUNTS(Ssend)
WAITS(Wait) WAITS(Waitall) WAITS(Waitany) WAITS(Waitsome) WAITS(Init_thread) WAITS(Finalize)
