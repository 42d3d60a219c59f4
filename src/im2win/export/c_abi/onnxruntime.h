/* The part of ONNX Runtime's C interface that an operator needs, with its memory layout. Both tables only grow at their ends, so these
   offsets are valid in ONNX Runtime 1.17 (interface version 17, the first in which operators can use its threads) and in every later
   version. Entries in between are left out. */
#ifndef IM2WIN_ONNXRUNTIME_H
#define IM2WIN_ONNXRUNTIME_H

#include <stddef.h>
#include <stdint.h>

#define ORT_VERSION 17      /* of the interface: what is asked for, and what the operator says that it is */
#define ORT_NEEDED "1.17"   /* the release that brought it */
#define ORT_FIRST_VERSION 1 /* which every release has */

enum { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 }; /* codes of a status */
enum { ORT_FLOAT = 1, ORT_UINT8 = 2, ORT_INT8 = 3, ORT_INT32 = 6 }; /* types of an element */
enum { ORT_REQUIRED = 0, ORT_OPTIONAL = 1 };     /* what an input or output is */
enum { ORT_MEMORY_DEFAULT = 0 };                 /* where an input lies */

typedef struct ort_status ort_status; /* NULL: all went well */
typedef struct ort_options ort_options;
typedef struct ort_domain ort_domain;
typedef struct ort_info ort_info; /* a node, while its kernel is made */
typedef struct ort_context ort_context; /* a run of a node */
typedef struct ort_value ort_value;
typedef struct ort_shape ort_shape;
typedef struct ort_operator ort_operator;
typedef void (*ort_unused)(void);

/* The table of functions; the comment before each is its index. */
typedef struct {
  /* 0 */ ort_status *(*create_status)(int code, const char *message);
  ort_unused unused_1[25];
  /* 26 */ ort_status *(*create_domain)(const char *name, ort_domain **made);
  /* 27 */ ort_status *(*add_operator)(ort_domain *domain, const ort_operator *one);
  /* 28 */ ort_status *(*add_domain)(ort_options *options, ort_domain *domain);
  ort_unused unused_29[22];
  /* 51 */ ort_status *(*data)(ort_value *value, void **data);
  ort_unused unused_52[9];
  /* 61 */ ort_status *(*rank)(const ort_shape *shape, size_t *rank);
  /* 62 */ ort_status *(*sizes)(const ort_shape *shape, int64_t *sizes, size_t rank);
  ort_unused unused_63;
  /* 64 */ ort_status *(*elements)(const ort_shape *shape, size_t *count);
  /* 65 */ ort_status *(*shape)(const ort_value *value, ort_shape **shape);
  ort_unused unused_66[21];
  /* 87 */ ort_status *(*string)(const ort_info *info, const char *attribute, char *text, size_t *size);
  ort_unused unused_88[2];
  /* 90 */ ort_status *(*input)(const ort_context *context, size_t index, const ort_value **value);
  /* 91 */ ort_status *(*output)(ort_context *context, size_t index, const int64_t *sizes, size_t rank, ort_value **value);
  ort_unused unused_92;
  /* 93 */ void (*release_status)(ort_status *status);
  ort_unused unused_94[5];
  /* 99 */ void (*release_shape)(ort_shape *shape);
  ort_unused unused_100[149];
  /* 249 */ ort_status *(*constant)(const ort_info *info, size_t index, int *is_constant, const ort_value **value);
  ort_unused unused_250[24];
  /* 274 */ ort_status *(*parallel_for)(const ort_context *context, void (*task)(void *, size_t), size_t count, size_t batches, void *data);
} ort_api;

/* The argument of a library's entry point. The table of an unsupported version is NULL. */
typedef struct {
  const ort_api *(*api)(uint32_t version);
  const char *(*release)(void);
} ort_base;

/* An operator of version 17; optional functions are NULL. */
struct ort_operator {
  uint32_t version;
  ort_unused unused_create;
  const char *(*name)(const ort_operator *self);
  const char *(*provider)(const ort_operator *self); /* NULL: the CPU */
  int (*input_type)(const ort_operator *self, size_t index);
  size_t (*inputs)(const ort_operator *self);
  int (*output_type)(const ort_operator *self, size_t index);
  size_t (*outputs)(const ort_operator *self);
  ort_unused unused_compute;
  /* 9 */ void (*destroy)(void *kernel);
  int (*input_characteristic)(const ort_operator *self, size_t index);
  int (*output_characteristic)(const ort_operator *self, size_t index);
  /* 12 */ int (*input_memory)(const ort_operator *self, size_t index);
  ort_unused unused_variadic[4];
  /* 17 */ ort_status *(*create)(const ort_operator *self, const ort_api *api, const ort_info *info, void **kernel);
  /* 18 */ ort_status *(*compute)(void *kernel, ort_context *context);
  ort_unused unused_infer_shape, unused_versions[2]; /* no versions: 1 and all later ones */
};

#define ORT_PLACE(type, field, place) _Static_assert(offsetof(type, field) == (place) * sizeof(void *), #field)
ORT_PLACE(ort_api, create_domain, 26);
ORT_PLACE(ort_api, data, 51);
ORT_PLACE(ort_api, rank, 61);
ORT_PLACE(ort_api, elements, 64);
ORT_PLACE(ort_api, string, 87);
ORT_PLACE(ort_api, input, 90);
ORT_PLACE(ort_api, release_status, 93);
ORT_PLACE(ort_api, release_shape, 99);
ORT_PLACE(ort_api, constant, 249);
ORT_PLACE(ort_api, parallel_for, 274);
ORT_PLACE(ort_operator, destroy, 9);
ORT_PLACE(ort_operator, input_memory, 12);
ORT_PLACE(ort_operator, create, 17);
_Static_assert(sizeof(ort_operator) == 22 * sizeof(void *), "ort_operator");

#endif
