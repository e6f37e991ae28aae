/* Reductions on host memory, for all of RCCL's types and operations. */
#ifndef ARITHMETIC_H
#define ARITHMETIC_H

#include <stddef.h>
#include <stdint.h>

/* As RCCL numbers them in its kernels. */
enum operation { SUM, PROD, MAX, MIN, PRE_MUL_SUM, SUM_POST_DIV, OPERATIONS };
enum type { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, TYPES };

extern const size_t type_bytes[TYPES];

/* reduce makes to[i] = to[i] op from[i]. */
void reduce(enum type type, enum operation operation, void *to, const void *from, size_t count);
/* scale makes to[i] = from[i] * *factor, where the factor is of the same type. */
void scale(enum type type, void *to, const void *from, const void *factor, size_t count);
/* divide makes to[i] = to[i] / divisor, for integers. */
void divide(enum type type, void *to, int64_t divisor, size_t count);

#endif
