/* New arrays in the place of the last ones: where they lie, asked of them without running Python code.
 *
 * NumPy's array interface (version 3) is a public structure behind an attribute. It is reached through functions of
 * Python's stable ABI, given by address: nothing of the interpreter's own layout is known here. */
#include <stddef.h>

#include "partial_attention.h"

/* PyArrayInterface of that protocol. */
struct interface {
  int two, axes;
  char kind;
  int itemsize, flags;
  const intptr_t *shape, *strides;
  void *data;
};

struct binding {
  void *(*item)(void *tuple, intptr_t index);              /* PyTuple_GetItem: borrowed */
  void *(*attribute)(void *object, void *name);            /* PyObject_GetAttr: owned */
  const void *(*pointer)(void *capsule, const char *name); /* PyCapsule_GetPointer */
  void (*release)(void *object);                           /* Py_DecRef */
  void *name, *none;                                       /* "__array_struct__" and None */
  struct attention *attention;
  int64_t workspace; /* bytes that it has */
};

enum { MAX_AXES = 4 };

/* What is needed of an interface, which goes with its capsule. */
struct array {
  void *data;
  int64_t shape[MAX_AXES], strides[MAX_AXES];
};

/* Whether the array has so many axes and its elements lie side by side on the last. */
static int look_at(const struct binding *b, void *object, int axes, struct array *array) {
  void *capsule = b->attribute(object, b->name);
  const struct interface *given = capsule ? b->pointer(capsule, NULL) : NULL;
  const int fits = given && given->axes == axes && given->strides[axes - 1] == given->itemsize;
  for (int i = 0; fits && i < axes; ++i) {
    array->shape[i] = given->shape[i];
    array->strides[i] = given->strides[i];
  }
  if (fits) array->data = given->data;
  if (capsule) b->release(capsule);
  return fits;
}

static int has_shape(const struct array *array, int64_t batch, int64_t tokens, int64_t heads, int64_t head_dim) {
  const int64_t *shape = array->shape;
  return shape[0] == batch && shape[1] == tokens && shape[2] == heads && shape[3] == head_dim;
}

/* q, k, v and lengths (or None): arrays of the types of the last ones, lengths int64. Binds them and returns 0 where
 * they differ from those in addresses, strides and tokens alone, and the workspace is large enough; else nothing is
 * changed. */
int64_t bind_arrays(const struct binding *b, void *arrays) {
  struct attention a = *b->attention;
  struct array q, k, v, lengths = {.data = NULL};
  void *const given = b->item(arrays, 3);
  if (given != b->none && (!look_at(b, given, 1, &lengths) || lengths.shape[0] != a.batch)) return 1;
  if (!look_at(b, b->item(arrays, 0), 4, &q) || !has_shape(&q, a.batch, a.queries, a.heads, a.head_dim)) return 1;
  if (!look_at(b, b->item(arrays, 1), 4, &k) || !has_shape(&k, a.batch, k.shape[1], a.kv_heads, a.head_dim)) return 1;
  if (!look_at(b, b->item(arrays, 2), 4, &v) || !has_shape(&v, a.batch, k.shape[1], a.kv_heads, a.v_dim)) return 1;
  a.q = q.data, a.k = k.data, a.v = v.data, a.lengths = lengths.data, a.tokens = k.shape[1];
  a.q_batch_stride = q.strides[0], a.q_query_stride = q.strides[1], a.q_head_stride = q.strides[2];
  a.k_batch_stride = k.strides[0], a.k_token_stride = k.strides[1], a.k_head_stride = k.strides[2];
  a.v_batch_stride = v.strides[0], a.v_token_stride = v.strides[1], a.v_head_stride = v.strides[2];
  if (attention_workspace(&a) > b->workspace) return 1;
  *b->attention = a;
  return 0;
}
