#include "arithmetic.h"

#include <string.h>

const size_t type_bytes[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

/* bfloat16 is the upper half of a float; the conversion rounds to nearest, ties to even. */
typedef struct { uint16_t bits; } bfloat16;
static float from_bfloat16(bfloat16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
static bfloat16 to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (bfloat16){(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

#define SAME(x) (x)
/* Integers are computed without a sign, as they wrap. */
#define DEFINE(name, element, wide, load, store)                                                                       \
  static void reduce_##name(enum operation operation, element *to, const element *from, size_t count) {               \
    switch (operation) {                                                                                               \
    case PROD: for (size_t i = 0; i < count; i++) to[i] = store((wide)load(to[i]) * (wide)load(from[i])); break;       \
    case MAX: for (size_t i = 0; i < count; i++) if (load(from[i]) > load(to[i])) to[i] = from[i]; break;              \
    case MIN: for (size_t i = 0; i < count; i++) if (load(from[i]) < load(to[i])) to[i] = from[i]; break;              \
    default: for (size_t i = 0; i < count; i++) to[i] = store((wide)load(to[i]) + (wide)load(from[i]));                \
    }                                                                                                                  \
  }                                                                                                                    \
  static void scale_##name(element *to, const element *from, const element *factor, size_t count) {                   \
    for (size_t i = 0; i < count; i++) to[i] = store((wide)load(from[i]) * (wide)load(*factor));                       \
  }

DEFINE(int8, int8_t, unsigned, SAME, (int8_t))
DEFINE(uint8, uint8_t, unsigned, SAME, (uint8_t))
DEFINE(int32, int32_t, uint32_t, SAME, (int32_t))
DEFINE(uint32, uint32_t, uint32_t, SAME, (uint32_t))
DEFINE(int64, int64_t, uint64_t, SAME, (int64_t))
DEFINE(uint64, uint64_t, uint64_t, SAME, (uint64_t))
DEFINE(float16, _Float16, float, SAME, (_Float16))
DEFINE(float32, float, float, SAME, (float))
DEFINE(float64, double, double, SAME, (double))
DEFINE(bfloat16, bfloat16, float, from_bfloat16, to_bfloat16)

void reduce(enum type type, enum operation operation, void *to, const void *from, size_t count) {
  switch (type) {
  case INT8: reduce_int8(operation, to, from, count); break;
  case UINT8: reduce_uint8(operation, to, from, count); break;
  case INT32: reduce_int32(operation, to, from, count); break;
  case UINT32: reduce_uint32(operation, to, from, count); break;
  case INT64: reduce_int64(operation, to, from, count); break;
  case UINT64: reduce_uint64(operation, to, from, count); break;
  case FLOAT16: reduce_float16(operation, to, from, count); break;
  case FLOAT32: reduce_float32(operation, to, from, count); break;
  case FLOAT64: reduce_float64(operation, to, from, count); break;
  default: reduce_bfloat16(operation, to, from, count);
  }
}

void scale(enum type type, void *to, const void *from, const void *factor, size_t count) {
  switch (type) {
  case INT8: scale_int8(to, from, factor, count); break;
  case UINT8: scale_uint8(to, from, factor, count); break;
  case INT32: scale_int32(to, from, factor, count); break;
  case UINT32: scale_uint32(to, from, factor, count); break;
  case INT64: scale_int64(to, from, factor, count); break;
  case UINT64: scale_uint64(to, from, factor, count); break;
  case FLOAT16: scale_float16(to, from, factor, count); break;
  case FLOAT32: scale_float32(to, from, factor, count); break;
  case FLOAT64: scale_float64(to, from, factor, count); break;
  default: scale_bfloat16(to, from, factor, count);
  }
}

#define DIVIDE(element) for (size_t i = 0; i < count; i++) ((element *)to)[i] = (element)(((element *)to)[i] / (element)divisor)
void divide(enum type type, void *to, int64_t divisor, size_t count) {
  switch (type) {
  case INT8: DIVIDE(int8_t); break;
  case UINT8: DIVIDE(uint8_t); break;
  case INT32: DIVIDE(int32_t); break;
  case UINT32: DIVIDE(uint32_t); break;
  case INT64: DIVIDE(int64_t); break;
  case UINT64: DIVIDE(uint64_t); break;
  default: break; /* RCCL scales floating-point numbers instead */
  }
}
