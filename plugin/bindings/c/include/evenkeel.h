/* Evenkeel: collective operations between processes, from C.
 *
 * Generated from the library's sources; do not edit.
 *
 * A group is a set of processes (or threads), each with a number, its rank. The ranks find each other through a store and reach
 * each other by TCP or, on one host, through shared memory. All ranks of a group call the same operations in the same order.
 *
 * Every function that can fail returns a status. If it is not EVENKEEL_OK, evenkeel_last_error() returns what went wrong in one
 * line, for the calling thread, until that thread's next call.
 *
 * Pointers to groups, stores and requests must come from this library and not have been freed. Pointers to data must be valid for
 * the number of bytes in the call. No other thread may change the data, or read what the call writes, until the call returns. The
 * pointer may be NULL when there is no data. Buffers of one call must not overlap. Strings are UTF-8 and end in a zero byte. An
 * object is written through a pointer only when the call succeeds.
 *
 * A call waits for its operation, unless its options have a pointer in `request`: then it starts the operation and returns. The
 * operation makes progress by itself. Its buffers, and the places for its results, must stay as they are until it is done. Lists of
 * lengths and counts are copied. Operations of a tag run in the order of their calls; messages only wait for those in the same
 * direction with the same rank.
 *
 * Several threads can use a group at a time, each with its own tag. Groups, stores and requests must not be freed while another
 * thread uses them. After fork() the child cannot use groups, stores and requests of the parent: calls fail. It can open its own.
 */


#ifndef EVENKEEL_H
#define EVENKEEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * Signed, 8 bits. (Types and reductions have the same numbers as in NCCL.)
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
 * Maximum.
 */
#define EVENKEEL_MAX 2

/**
 * Minimum.
 */
#define EVENKEEL_MIN 3

/**
 * A rank's membership in a group.
 */
typedef struct evenkeel_group evenkeel_group;

/**
 * An operation that was started, by a call with a pointer in `request`.
 */
typedef struct evenkeel_request evenkeel_request;

/**
 * A store, in which ranks find each other.
 */
typedef struct evenkeel_store evenkeel_store;

/**
 * What every function that can fail returns: EVENKEEL_OK or one of the errors.
 */
typedef int32_t evenkeel_status;

/**
 * The options of a call. All ranks must pass the same, except for the timeout. Zeros, or NULL instead of the options, are the
 * defaults.
 */
typedef struct {
  /**
   * Operations with different tags may be in progress at the same time.
   */
  uint32_t tag;
  /**
   * Seconds for which the operation may make no progress; 0: the group's timeout.
   */
  double timeout;
  /**
   * The algorithm of an all-reduce: "ring", "ring_chunked", "halving_doubling", "recursive_doubling", "bcube",
   * "direct" or "hierarchical". NULL: selected by the number of ranks and bytes.
   */
  const char *algorithm;
  /**
   * Where to write a request: the call starts the operation and returns. NULL: it waits for the operation. Not all ranks need the
   * same.
   */
  evenkeel_request **request;
} evenkeel_call;

/**
 * A custom reduction: combines `count` elements of `other` into those of `into`. Elements may have any alignment. The reduction must
 * be associative and commutative. It is called from any thread, by several at a time, and must return.
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
 * The version of the library, such as "0.1.0".
 */
const char *evenkeel_version(void);

/**
 * The error of the last call of this thread that failed, in one line; empty if none has failed. Valid until the thread's next
 * call.
 */
const char *evenkeel_last_error(void);

/**
 * The ranks that caused the last error, as far as known. Writes up to `capacity` of them, and returns their number.
 */
size_t evenkeel_last_error_ranks(size_t *ranks, size_t capacity);

/**
 * Whether the group is still usable after the last error. If not, every later call returns the error that ended the group: free
 * it, and make another one.
 */
bool evenkeel_last_error_group_usable(void);

/**
 * Opens a store by its address: "file:/path/of/a/folder", "tcp://host:port" (served by evenkeel-run or
 * evenkeel_group_join_launched) or "redis://host:port". Waits for its server for up to `timeout` seconds.
 */
evenkeel_status evenkeel_store_open(const char *address, double timeout, evenkeel_store **store);

/**
 * Creates a store in this process's memory, for ranks that are threads.
 */
evenkeel_status evenkeel_store_memory(evenkeel_store **store);

/**
 * Creates a store of the names that begin with `prefix` and a slash in another store, so that several jobs or groups can share
 * that store. The other store may be freed first.
 */
evenkeel_status evenkeel_store_prefix(const evenkeel_store *store,
                                      const char *prefix,
                                      evenkeel_store **part);

/**
 * Frees a store. Groups that have joined through it do not need it any more. NULL is ignored.
 */
void evenkeel_store_free(evenkeel_store *store);

/**
 * Joins the group of all `size` ranks that find each other in this store, as rank `rank`. Returns once all ranks have joined.
 *
 * `transport` is how the ranks reach each other, the same for all: "tcp" or "tcp:INTERFACE" (such as "tcp:eth0"); "shm", shared
 * memory on one host; "auto" or "auto:INTERFACE", shared memory within hosts and TCP between them; or "tls" or "tls:INTERFACE", TCP
 * with TLS between ranks that authenticate by certificate. NULL is "tcp". The environment variables of the NCCL plugin set TCP.
 * Others name the PEM files for TLS: EVENKEEL_TLS_CERT (this rank's certificate), EVENKEEL_TLS_KEY (its key) and EVENKEEL_TLS_CA
 * (the certificates of the authority that signed the certificates of all ranks, or a folder of them).
 *
 * `timeout` is how many seconds to wait for the other ranks, and the group's timeout from then on. Groups that exist at the same
 * time need separate stores or prefixes.
 */
evenkeel_status evenkeel_group_join(const evenkeel_store *store,
                                    size_t rank,
                                    size_t size,
                                    const char *transport,
                                    double timeout,
                                    evenkeel_group **group);

/**
 * Joins the group of this name of all ranks that a launcher has started: evenkeel-run, torchrun, mpirun or srun. The environment
 * has this process's rank, and the store: EVENKEEL_STORE, or MASTER_ADDR and MASTER_PORT, where rank 0 serves one. Groups that
 * exist at the same time need different names. The rest is as for evenkeel_group_join.
 */
evenkeel_status evenkeel_group_join_launched(const char *name,
                                             const char *transport,
                                             double timeout,
                                             evenkeel_group **group);

/**
 * Makes the group that follows this one: the ranks of this one that are alive, in the order of their ranks, and then the newcomers
 * that wait in evenkeel_group_join_as_newcomer. All live ranks call it: after an error that ended the group, or at any other time
 * between operations. Afterwards this group cannot be used, and is freed as always.
 *
 * `store` is the one, or the prefix, through which the group was joined; it must outlive the ranks that are lost. The ranks wait for
 * newcomers until there are at least `min_size` ranks. `timeout` is in seconds; 0: the group's.
 *
 * EVENKEEL_TIMEOUT: a live rank has not called it, or there are too few ranks. Call it again, or free this group. EVENKEEL_LOST naming
 * this rank: the others went on without it, and it may come back as a newcomer.
 */
evenkeel_status evenkeel_group_reconfigure(const evenkeel_group *group,
                                           const evenkeel_store *store,
                                           size_t min_size,
                                           double timeout,
                                           evenkeel_group **next);

/**
 * Joins the next group that ranks which share this store or prefix make by evenkeel_group_reconfigure. Waits for `timeout` seconds,
 * which are the group's timeout from then on. The rest is as for evenkeel_group_join.
 */
evenkeel_status evenkeel_group_join_as_newcomer(const evenkeel_store *store,
                                                const char *transport,
                                                double timeout,
                                                evenkeel_group **group);

/**
 * For each rank of a group that follows another one, its rank in that one; SIZE_MAX for a newcomer. Writes up to `capacity` of them,
 * and returns their number: 0 if the group follows no other one.
 */
size_t evenkeel_group_previous_ranks(const evenkeel_group *group,
                                     size_t *ranks,
                                     size_t capacity);

/**
 * Leaves a group and frees it. Waits up to a second until the other ranks have what this rank sent. They continue as long as they
 * need nothing more from it. NULL is ignored.
 */
void evenkeel_group_free(evenkeel_group *group);

/**
 * This process's rank in the group, from 0; SIZE_MAX for NULL.
 */
size_t evenkeel_group_rank(const evenkeel_group *group);

/**
 * The number of ranks; 0 for NULL.
 */
size_t evenkeel_group_size(const evenkeel_group *group);

/**
 * Returns the error that ended the group, which cannot be used then, or EVENKEEL_OK.
 */
evenkeel_status evenkeel_group_failure(const evenkeel_group *group);

/**
 * Aborts the group on all ranks. Their operations fail with this reason.
 */
evenkeel_status evenkeel_group_abort(const evenkeel_group *group, const char *reason);

/**
 * Makes a group of `count` of the ranks, numbered in the order given; NULL on the other ranks. It needs no message and uses this
 * group's connections. When one of the groups fails, so does the other. The ranks of the new group must make groups of the same
 * ranks in the same order. Either group may be freed first.
 */
evenkeel_status evenkeel_group_sub(const evenkeel_group *group,
                                   const size_t *ranks,
                                   size_t count,
                                   evenkeel_group **sub);

/**
 * Makes the group of all ranks that pass the same color, in the order of their ranks here; NULL for a negative color. All ranks
 * call it.
 */
evenkeel_status evenkeel_group_split(const evenkeel_group *group,
                                     int64_t color,
                                     const evenkeel_call *call,
                                     evenkeel_group **sub);

/**
 * Sets the rate at which this rank's host can send and receive, in any unit that all ranks share, such as Mbit/s. All ranks call it,
 * with no other operation in progress; it waits for them. From then on the algorithm "direct" gives each rank a share of the buffer
 * that fits its link, and an all-reduce that names no algorithm takes it where it should be faster. 0 stands for an unknown rate: if
 * any rank sets it, the shares are equal again. Groups that are made of this one afterwards have the same rates.
 */
evenkeel_status evenkeel_group_set_link_rate(const evenkeel_group *group,
                                             uint64_t rate,
                                             const evenkeel_call *call);

/**
 * Whether the operation is done. Does not block. True for NULL.
 */
bool evenkeel_request_is_done(const evenkeel_request *request);

/**
 * Waits until the operation is done, for `timeout` seconds at most, and returns its status. 0: until it is done, which the operation's
 * own timeout bounds. After EVENKEEL_TIMEOUT the operation is still in progress unless evenkeel_request_is_done. A request can be
 * awaited several times, and by several threads.
 */
evenkeel_status evenkeel_request_wait(const evenkeel_request *request,
                                      double timeout);

/**
 * Frees a request. Waits until its operation is done, so that the buffers can be freed afterwards. To end operations earlier, abort the
 * group. NULL is ignored.
 */
void evenkeel_request_free(evenkeel_request *request);

/**
 * Reduces the `count` elements of all ranks. Afterwards all ranks have the same result, bitwise. After an error the contents of the
 * buffer are undefined.
 */
evenkeel_status evenkeel_allreduce(const evenkeel_group *group,
                                   void *data,
                                   size_t count,
                                   int32_t datatype,
                                   int32_t op,
                                   const evenkeel_call *call);

/**
 * evenkeel_allreduce with a custom reduction on elements of `element` bytes. `context` is passed to it.
 */
evenkeel_status evenkeel_allreduce_custom(const evenkeel_group *group,
                                          void *data,
                                          size_t count,
                                          size_t element,
                                          evenkeel_combine combine,
                                          void *context,
                                          const evenkeel_call *call);

/**
 * Reduces the `count` elements of all ranks to rank `root`. Afterwards the contents of the other ranks' buffers are undefined.
 */
evenkeel_status evenkeel_reduce(const evenkeel_group *group,
                                void *data,
                                size_t count,
                                int32_t datatype,
                                int32_t op,
                                size_t root,
                                const evenkeel_call *call);

/**
 * Reduces the elements of all ranks and scatters the result. Afterwards rank i has part i, at its place in the buffer; the rest of
 * the buffer is undefined. `counts` are the numbers of elements of the parts, one for each rank; NULL: equal parts of `count`. Their
 * sum must be `count`.
 */
evenkeel_status evenkeel_reduce_scatter(const evenkeel_group *group,
                                        void *data,
                                        size_t count,
                                        const size_t *counts,
                                        int32_t datatype,
                                        int32_t op,
                                        const evenkeel_call *call);

/**
 * Sends the bytes of rank `root` to all ranks.
 */
evenkeel_status evenkeel_broadcast(const evenkeel_group *group,
                                   void *data,
                                   size_t bytes,
                                   size_t root,
                                   const evenkeel_call *call);

/**
 * Each rank passes its part at its place in the buffer. Afterwards all ranks have all parts. `lengths` are the lengths of the parts
 * in bytes, one for each rank, whose sum is `bytes`; NULL: equal parts.
 */
evenkeel_status evenkeel_allgather(const evenkeel_group *group,
                                   void *data,
                                   size_t bytes,
                                   const size_t *lengths,
                                   const evenkeel_call *call);

/**
 * Gathers the inputs of all ranks at rank `root`, in the order of the ranks. The root passes `output` of `output_bytes`; the others
 * pass NULL and 0. `lengths` are the lengths of the inputs in bytes, one for each rank, the same on all ranks; NULL: all are as long
 * as this rank's.
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
 * Scatters the input of rank `root`, a part for each rank. The root passes `input` of `input_bytes`; the others pass NULL and 0.
 * `lengths` are the lengths of the outputs in bytes, one for each rank, the same on all ranks; NULL: all are as long as this rank's.
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
 * Sends part i of the input to rank i; part i of the output comes from rank i. `sent` and `received` are the lengths of the parts in
 * bytes, one for each rank; NULL: equal parts.
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
 * Sends a message to rank `to`. Returns when the bytes may be changed; for a large message that is when the other rank
 * has received it. Messages of a tag arrive in order.
 */
evenkeel_status evenkeel_send(const evenkeel_group *group,
                              const void *data,
                              size_t bytes,
                              size_t to,
                              const evenkeel_call *call);

/**
 * Receives a message of up to `capacity` bytes from rank `from`. Its length is written to `received`, unless that is NULL.
 */
evenkeel_status evenkeel_recv(const evenkeel_group *group,
                              void *data,
                              size_t capacity,
                              size_t from,
                              size_t *received,
                              const evenkeel_call *call);

/**
 * Receives a message from the first rank that sends one. That rank and the message's length are written to `from` and `received`,
 * unless they are NULL.
 */
evenkeel_status evenkeel_recv_any(const evenkeel_group *group,
                                  void *data,
                                  size_t capacity,
                                  size_t *from,
                                  size_t *received,
                                  const evenkeel_call *call);

/**
 * Writes the last calls of this process, of all its groups, to a file, as JSON: which call each group is in, its number, sizes and
 * state, whom it waits for, and why it failed. For a look at a program that hangs, from another thread, or after an error.
 *
 * Where EVENKEEL_FLIGHT_RECORDER names the start of a path, such as /tmp/rank_, every process with a group also answers the requests
 * of `kubectl evenkeel why` in that folder, from a thread of its own.
 */
evenkeel_status evenkeel_flight_recorder_dump(const char *path);

/**
 * Names a group for the flight recorder, and its ranks by their numbers in the job: one number for each rank. The first name stays.
 */
evenkeel_status evenkeel_group_set_name(const evenkeel_group *group,
                                        const char *name,
                                        const size_t *ranks,
                                        size_t count);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* EVENKEEL_H */
