/* The merge as an MPI operator: what MPI_Op_create takes (MPI standard, section 6.9.5).
 *
 * MPI passes no user pointer to an operator, so each record width has a function of its own. The datatype is one
 * record, hence `count` is a number of records and MPI cannot split one. The last ones make records of multiples of
 * 32 bytes, by which reductions are compared with other benchmarks' messages. */
#include <stddef.h>

#include "bins.h"
#include "records.h"

/* clang-format off */
#define EACH_HEAD_DIM(RECORD) \
    RECORD(8) RECORD(16) RECORD(24) RECORD(32) RECORD(40) RECORD(48) RECORD(56) RECORD(64) \
    RECORD(72) RECORD(80) RECORD(88) RECORD(96) RECORD(104) RECORD(112) RECORD(120) RECORD(128) \
    RECORD(136) RECORD(144) RECORD(152) RECORD(160) RECORD(168) RECORD(176) RECORD(184) RECORD(192) \
    RECORD(200) RECORD(208) RECORD(216) RECORD(224) RECORD(232) RECORD(240) RECORD(248) RECORD(256) \
    RECORD(512) \
    RECORD(6) RECORD(14) RECORD(22) RECORD(30) RECORD(38) RECORD(46) RECORD(54) RECORD(62) \
    RECORD(70) RECORD(78) RECORD(86) RECORD(94) RECORD(102) RECORD(110) RECORD(118) RECORD(126)
/* clang-format on */

#define RECORD(head_dim)                                                                                               \
  static void merge_##head_dim(void *in, void *inout, int *count, void *datatype) {                                    \
    (void)datatype;                                                                                                    \
    merge_partials(inout, in, *count, head_dim + RECORD_NUMERATOR);                                                    \
  }                                                                                                                    \
  static void merge_bins_##head_dim(void *in, void *inout, int *count, void *datatype) {                               \
    (void)datatype;                                                                                                    \
    merge_bins(inout, in, *count, bins_width(head_dim));                                                               \
  }
EACH_HEAD_DIM(RECORD)
#undef RECORD

typedef void mpi_user_function(void *, void *, int *, void *);

/* The operator for records of `head_dim` + 2 floats, or of so many bins; NULL where there is none. */
mpi_user_function *mpi_operator(int64_t head_dim, int bins) {
  switch (head_dim) {
#define RECORD(head_dim)                                                                                               \
  case head_dim:                                                                                                       \
    return bins ? merge_bins_##head_dim : merge_##head_dim;
    EACH_HEAD_DIM(RECORD)
#undef RECORD
  default:
    return NULL;
  }
}
