/* Evenkeel: collective operations between processes, from C.
 *
 * Made of the library's sources; do not edit.
 *
 * A group is a set of processes (or threads) with numbers, the ranks. They find each other through a store and reach each other
 * by TCP or, on one host, through shared memory. All ranks of a group call the same operations in the same order.
 *
 * Every function that can fail gives a status. When that is not EVENKEEL_OK, evenkeel_last_error() says in one line what went
 * wrong, for the calling thread, until that thread's next call.
 *
 * Pointers: to a group or store, what this library gave and did not free. To data, as many bytes as the call is told of, which
 * nobody else changes, and nobody reads what is written, until the call returns; NULL where there are none. Buffers of one call
 * must not overlap. Texts are UTF-8 and end in a zero byte. An object is written through a pointer only when the call succeeds.
 *
 * Threads: a group can be used by several threads at a time, with a tag of its own for each. Groups and stores must not be freed
 * while another thread uses them. After fork() only the parent may go on.
 */


#ifndef EVENKEEL_H
#define EVENKEEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * Signed, 8 bits. (The numbers of types and reductions are NCCL's.)
 */
#define EVENKEEL_INT8 0

/**
 * Unsigned, 8 bits.
 */
#define EVENKEEL_UINT8 1

/**
 * Signed, 32 bits.
 */
#define EVENKEEL_INT32 2

/**
 * Unsigned, 32 bits.
 */
#define EVENKEEL_UINT32 3

/**
 * Signed, 64 bits.
 */
#define EVENKEEL_INT64 4

/**
 * Unsigned, 64 bits.
 */
#define EVENKEEL_UINT64 5

/**
 * IEEE 754 binary16.
 */
#define EVENKEEL_FLOAT16 6

/**
 * IEEE 754 binary32: float.
 */
#define EVENKEEL_FLOAT32 7

/**
 * IEEE 754 binary64: double.
 */
#define EVENKEEL_FLOAT64 8

/**
 * The upper half of a binary32.
 */
#define EVENKEEL_BFLOAT16 9

/**
 * OCP FP8 E4M3: no infinity, largest number 448.
 */
#define EVENKEEL_FLOAT8_E4M3 10

/**
 * OCP FP8 E5M2: largest number 57344.
 */
#define EVENKEEL_FLOAT8_E5M2 11

/**
 * Sum.
 */
#define EVENKEEL_SUM 0

/**
 * Product.
 */
#define EVENKEEL_PROD 1

/**
 * The largest.
 */
#define EVENKEEL_MAX 2

/**
 * The smallest.
 */
#define EVENKEEL_MIN 3

/**
 * One rank's part in a group.
 */
typedef struct evenkeel_group evenkeel_group;

/**
 * Where ranks find each other.
 */
typedef struct evenkeel_store evenkeel_store;

/**
 * What every function that can fail returns: EVENKEEL_OK or one of the errors.
 */
typedef int32_t evenkeel_status;

/**
 * How an operation is to be done. All ranks must say the same, but for the timeout. Filled with zeros, or NULL in its place, it
 * asks for nothing special.
 */
typedef struct {
  /**
   * Operations with different tags may be in progress at the same time.
   */
  uint32_t tag;
  /**
   * Seconds for which nothing may move in it; 0: the group's timeout.
   */
  double timeout;
  /**
   * The algorithm of an all-reduce: "ring", "ring_chunked", "halving_doubling", "recursive_doubling" or "bcube". NULL: chosen by
   * the number of ranks and bytes.
   */
  const char *algorithm;
} evenkeel_call;

/**
 * A reduction of your own: combines `count` elements of `other` into those of `into`. Elements may have any alignment. It must not
 * matter in which order, or which of two is first. It is called by any thread, by several at a time, and must return.
 */
typedef void (*evenkeel_combine)(void *into, const void *other, size_t count, void *context);

/**
 * Success.
 */
#define EVENKEEL_OK 0

/**
 * The arguments of the call are invalid. Nothing was done.
 */
#define EVENKEEL_ARGUMENT 1

/**
 * Nothing moved for the whole timeout, although every process that was probed is alive.
 */
#define EVENKEEL_TIMEOUT 2

/**
 * A rank's process has exited, does not respond or cannot be reached.
 */
#define EVENKEEL_LOST 3

/**
 * A rank aborted the group.
 */
#define EVENKEEL_ABORTED 4

/**
 * A local system call failed.
 */
#define EVENKEEL_SYSTEM 5

/**
 * The store cannot be used.
 */
#define EVENKEEL_STORE 6

/**
 * The ranks called different operations, or passed different counts.
 */
#define EVENKEEL_MISMATCH 7

/**
 * A defect of the library.
 */
#define EVENKEEL_INTERNAL 8

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The library's version, such as "0.1.0".
 */
const char *evenkeel_version(void);

/**
 * What went wrong in the last call of this thread that failed, in one line; empty if none has. Good until the thread's next
 * call.
 */
const char *evenkeel_last_error(void);

/**
 * The ranks that caused what evenkeel_last_error says, as far as that is known: writes up to `room` of them, and gives how many
 * there are.
 */
size_t evenkeel_last_error_ranks(size_t *ranks,
                                 size_t room);

/**
 * Whether the group that was used can be used on after what evenkeel_last_error says. If not, every later call with it gives
 * the error that ended it: free it, and make another one.
 */
bool evenkeel_last_error_group_usable(void);

/**
 * Opens a store by its address: "file:/path/of/a/folder", "tcp://host:port" (as evenkeel-run and evenkeel_group_join_launched
 * serve it) or "redis://host:port"; waits for its server no longer than `timeout` seconds.
 */
evenkeel_status evenkeel_store_open(const char *address,
                                    double timeout,
                                    evenkeel_store **store);

/**
 * Makes a store in this process's memory, for ranks that are threads.
 */
evenkeel_status evenkeel_store_memory(evenkeel_store **store);

/**
 * The part of a store whose names begin with `prefix` and a slash: several jobs, or groups, can share a store so. The first
 * store may be freed before.
 */
evenkeel_status evenkeel_store_prefix(const evenkeel_store *store,
                                      const char *prefix,
                                      evenkeel_store **part);

/**
 * Frees a store. Groups that have met in it do not need it. NULL is none.
 */
void evenkeel_store_free(evenkeel_store *store);

/**
 * Joins the group of all `size` ranks that meet in this store, as rank `rank`. Returns once all have.
 *
 * `transport` is how the ranks reach each other, the same for all: "tcp", "tcp:INTERFACE" (such as "tcp:eth0"), "shm", shared
 * memory of one host, "auto" or "auto:INTERFACE", shared memory within hosts and TCP between them, or "tls" or "tls:INTERFACE",
 * encrypted TCP between ranks that show certificates; NULL is "tcp". Environment variables set TCP, the same as for the NCCL
 * plugin, and name the PEM files for TLS: EVENKEEL_TLS_CERT (this rank's certificate), EVENKEEL_TLS_KEY (its key) and
 * EVENKEEL_TLS_CA (the certificates of the authority that has signed all ranks', or a folder of them). `timeout` is how many seconds to wait for the others, and the group's
 * timeout from then on. A store may be used for one group at a time and under one prefix.
 */
evenkeel_status evenkeel_group_join(const evenkeel_store *store,
                                    size_t rank,
                                    size_t size,
                                    const char *transport,
                                    double timeout,
                                    evenkeel_group **group);

/**
 * Joins the group of this name of all ranks that a launcher has started: evenkeel-run, torchrun, mpirun, srun. The environment
 * says which rank this is, and where to meet: EVENKEEL_STORE, or MASTER_ADDR and MASTER_PORT, where rank 0 serves a store.
 * Groups that live at the same time have different names. The rest is as for evenkeel_group_join.
 */
evenkeel_status evenkeel_group_join_launched(const char *name,
                                             const char *transport,
                                             double timeout,
                                             evenkeel_group **group);

/**
 * Leaves a group and frees it. Waits up to a second until the others have what this rank sent; they go on as long as they need
 * nothing more from it. NULL is none.
 */
void evenkeel_group_free(evenkeel_group *group);

/**
 * This process's number in the group, from 0; SIZE_MAX for NULL.
 */
size_t evenkeel_group_rank(const evenkeel_group *group);

/**
 * How many ranks there are; 0 for NULL.
 */
size_t evenkeel_group_size(const evenkeel_group *group);

/**
 * Gives the error that ended the group, which then nothing more can be done with, or EVENKEEL_OK.
 */
evenkeel_status evenkeel_group_failure(const evenkeel_group *group);

/**
 * Ends the group for all ranks: their operations fail with this reason.
 */
evenkeel_status evenkeel_group_abort(const evenkeel_group *group, const char *reason);

/**
 * Makes a group of `count` of the ranks, which are numbered in the order given; it is NULL on the others. It costs no message,
 * and uses this group's connections: when one fails, so does the other. The ranks of the new group must make groups of the same
 * ranks in the same order. Either may be freed before the other.
 */
evenkeel_status evenkeel_group_sub(const evenkeel_group *group,
                                   const size_t *ranks,
                                   size_t count,
                                   evenkeel_group **sub);

/**
 * Makes the group of all ranks that give the same color, in the order of their numbers here; NULL for a negative color. All ranks
 * call it.
 */
evenkeel_status evenkeel_group_split(const evenkeel_group *group,
                                     int64_t color,
                                     const evenkeel_call *call,
                                     evenkeel_group **sub);

/**
 * Combines the `count` elements of all ranks: afterwards all have the same, to the bit. After an error what is in the buffer is
 * undefined.
 */
evenkeel_status evenkeel_allreduce(const evenkeel_group *group,
                                   void *data,
                                   size_t count,
                                   int32_t datatype,
                                   int32_t op,
                                   const evenkeel_call *call);

/**
 * evenkeel_allreduce with a reduction of your own, of elements of `element` bytes; `context` is passed to it.
 */
evenkeel_status evenkeel_allreduce_custom(const evenkeel_group *group,
                                          void *data,
                                          size_t count,
                                          size_t element,
                                          evenkeel_combine combine,
                                          void *context,
                                          const evenkeel_call *call);

/**
 * Combines the `count` elements of all ranks, for rank `root`. What is in the others' buffers afterwards is undefined.
 */
evenkeel_status evenkeel_reduce(const evenkeel_group *group,
                                void *data,
                                size_t count,
                                int32_t datatype,
                                int32_t op,
                                size_t root,
                                const evenkeel_call *call);

/**
 * Combines the elements of all ranks: afterwards rank i has part i, at its place in the buffer; what is in the rest is undefined.
 * `counts` are the parts' numbers of elements, one for each rank; NULL: equal parts of `count`. All must make `count` together.
 */
evenkeel_status evenkeel_reduce_scatter(const evenkeel_group *group,
                                        void *data,
                                        size_t count,
                                        const size_t *counts,
                                        int32_t datatype,
                                        int32_t op,
                                        const evenkeel_call *call);

/**
 * Gives all ranks the bytes of rank `root`.
 */
evenkeel_status evenkeel_broadcast(const evenkeel_group *group,
                                   void *data,
                                   size_t bytes,
                                   size_t root,
                                   const evenkeel_call *call);

/**
 * Each rank has its part at its place in the buffer; afterwards all have all. `lengths` are the parts' bytes, one for each rank,
 * which make `bytes` together; NULL: equal parts.
 */
evenkeel_status evenkeel_allgather(const evenkeel_group *group,
                                   void *data,
                                   size_t bytes,
                                   const size_t *lengths,
                                   const evenkeel_call *call);

/**
 * Every rank's bytes go to rank `root`, one rank's after the other's. `output` is the root's, and has `output_bytes`; the others pass
 * NULL and 0. `lengths` are the inputs' bytes, one for each rank, the same on all ranks; NULL: all are as long as this rank's.
 */
evenkeel_status evenkeel_gather(const evenkeel_group *group,
                                const void *input,
                                size_t input_bytes,
                                void *output,
                                size_t output_bytes,
                                const size_t *lengths,
                                size_t root,
                                const evenkeel_call *call);

/**
 * The bytes of rank `root` go to the ranks, a part for each. `input` is the root's, and has `input_bytes`; the others pass NULL and 0.
 * `lengths` are the outputs' bytes, one for each rank, the same on all ranks; NULL: all are as long as this rank's.
 */
evenkeel_status evenkeel_scatter(const evenkeel_group *group,
                                 const void *input,
                                 size_t input_bytes,
                                 void *output,
                                 size_t output_bytes,
                                 const size_t *lengths,
                                 size_t root,
                                 const evenkeel_call *call);

/**
 * Part i of the input goes to rank i; part i of the output comes from rank i. `sent` and `received` are the parts' bytes, one for
 * each rank; NULL: equal parts.
 */
evenkeel_status evenkeel_alltoall(const evenkeel_group *group,
                                  const void *input,
                                  size_t input_bytes,
                                  const size_t *sent,
                                  void *output,
                                  size_t output_bytes,
                                  const size_t *received,
                                  const evenkeel_call *call);

/**
 * Returns when all ranks have called it.
 */
evenkeel_status evenkeel_barrier(const evenkeel_group *group, const evenkeel_call *call);

/**
 * Sends a message of up to 1 GiB to rank `to`. Returns when the bytes may be changed: of a large message when the other has it.
 * Messages of a tag arrive in their order.
 */
evenkeel_status evenkeel_send(const evenkeel_group *group,
                              const void *data,
                              size_t bytes,
                              size_t to,
                              const evenkeel_call *call);

/**
 * Receives a message of up to `room` bytes from rank `from`; `received`, unless it is NULL, gets its length.
 */
evenkeel_status evenkeel_recv(const evenkeel_group *group,
                              void *data,
                              size_t room,
                              size_t from,
                              size_t *received,
                              const evenkeel_call *call);

/**
 * Receives a message from whichever rank sends one first; `from` and `received`, unless they are NULL, get that rank and the
 * message's length.
 */
evenkeel_status evenkeel_recv_any(const evenkeel_group *group,
                                  void *data,
                                  size_t room,
                                  size_t *from,
                                  size_t *received,
                                  const evenkeel_call *call);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* EVENKEEL_H */
