/* One rank: reads commands, one a line, and answers each with a line that begins with "ok" or "failed". The caller decides when all
 * ranks have done a command, and so is the barrier between them.
 *
 *   id                                        -> ok ID
 *   init ID RANKS RANK                        -> ok COMMUNICATOR
 *   random SEED COUNT MAXBYTES COMMUNICATOR...  random operations, every element checked
 *   allreduce COMMUNICATOR BYTES COUNT        -> ok SECONDS...  of each; every element of every one checked
 *   launch COMMUNICATOR BYTES                   an all-reduce that is not waited for
 *   flip                                        one bit of the next data received is flipped
 *   abort COMMUNICATOR, destroy COMMUNICATOR
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "arithmetic.h"
#include "lab.h"

/* RCCL's and HIP's public interfaces. */
enum { SUCCESS = 0, NOT_READY = 600, AVG = 4, OPERATION_NAMES = 5, HOST_SCALAR = 1 };
typedef struct { char bytes[128]; } unique_id;
int ncclGetUniqueId(unique_id *id);
int ncclCommInitRank(void **comm, int ranks, unique_id id, int rank);
int ncclCommDestroy(void *comm);
int ncclCommAbort(void *comm);
int ncclCommGetAsyncError(void *comm, int *error);
const char *ncclGetErrorString(int error);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, void *comm, void *stream);
int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, void *comm, void *stream);
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, void *comm, void *stream);
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *comm, void *stream);
int ncclAllGather(const void *from, void *to, size_t count, int type, void *comm, void *stream);
int ncclAllToAll(const void *from, void *to, size_t count, int type, void *comm, void *stream);
int ncclAllToAllv(const void *from, const size_t *counts, const size_t *offsets, void *to, const size_t *in_counts, const size_t *in_offsets, int type, void *comm, void *stream);
int ncclGather(const void *from, void *to, size_t count, int type, int root, void *comm, void *stream);
int ncclScatter(const void *from, void *to, size_t count, int type, int root, void *comm, void *stream);
int ncclSend(const void *from, size_t count, int type, int peer, void *comm, void *stream);
int ncclRecv(void *to, size_t count, int type, int peer, void *comm, void *stream);
int ncclRedOpCreatePreMulSum(int *operation, void *factor, int type, int residence, void *comm);
int ncclRedOpDestroy(int operation, void *comm);
int hipSetDevice(int device);
int hipMalloc(void **memory, size_t bytes);
int hipFree(void *memory);
int hipStreamCreateWithFlags(void **stream, unsigned flags);
int hipStreamDestroy(void *stream);
int hipEventCreate(void **event);
int hipEventDestroy(void *event);
int hipEventRecord(void *event, void *stream);
int hipEventQuery(void *event);

enum { MAX_COMMUNICATORS = 16, MAX_RANKS = 64, GUARD = 64, FACTOR = 2, SMALL = 8, POISON = 0xA5 };
static const double TIMEOUT = 120;

static struct communicator { void *comm, *stream, *event; int ranks, rank; } communicators[MAX_COMMUNICATORS];
static int opened;

static char failure[512]; /* of the current command; empty while there is none */
static int fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  if (!failure[0]) vsnprintf(failure, sizeof failure, format, arguments);
  va_end(arguments);
  return 0;
}
static int nccl(int error, const char *call) { return error == SUCCESS ? 1 : fail("%s: %s (%d)", call, ncclGetErrorString(error), error); }
static int hip(int error, const char *call) { return error == SUCCESS ? 1 : fail("%s: HIP error %d", call, error); }
#define NCCL(call, ...) nccl(call(__VA_ARGS__), #call)
#define HIP(call, ...) hip(call(__VA_ARGS__), #call)

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* wait waits for what the communicator's stream has been given, or for an error of RCCL. */
static int wait(struct communicator *c) {
  if (!HIP(hipEventRecord, c->event, c->stream)) return 0;
  for (double deadline = now() + TIMEOUT; hipEventQuery(c->event) == NOT_READY;) {
    int error = SUCCESS;
    if (!NCCL(ncclCommGetAsyncError, c->comm, &error) || !nccl(error, "asynchronous error")) return 0;
    if (now() > deadline) return fail("not done after %.0f s, and RCCL reports no error", TIMEOUT);
    nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
  }
  return 1;
}

/* Numbers of all types, so small that every type holds every result. */
static void encode(int type, int64_t value, char *to) {
  float single = (float)value;
  double wide = (double)value;
  _Float16 half = (_Float16)single;
  uint32_t bits;
  switch (type) {
  case FLOAT16: memcpy(to, &half, 2); break;
  case FLOAT32: memcpy(to, &single, 4); break;
  case FLOAT64: memcpy(to, &wide, 8); break;
  case BFLOAT16: memcpy(&bits, &single, 4), bits >>= 16, memcpy(to, &bits, 2); break;
  default: memcpy(to, &value, type_bytes[type]);
  }
}
static int64_t element(uint64_t serial, int rank, uint64_t index) {
  uint64_t mixed = (index * 64 + (uint64_t)rank + serial * 7919 + 1) * UINT64_C(0x9E3779B97F4A7C15);
  return (int64_t)(mixed >> 59) % SMALL;
}

enum kind { K_ALL_REDUCE, K_REDUCE, K_REDUCE_SCATTER, K_BROADCAST, K_ALL_GATHER, K_ALL_TO_ALL, K_ALL_TO_ALL_V, K_GATHER, K_SCATTER, K_NEIGHBOURS, KINDS };
static const char *kinds[] = {"all-reduce", "reduce", "reduce-scatter", "broadcast", "all-gather", "all-to-all", "all-to-allv", "gather", "scatter", "send and receive"};
static const char *operations[] = {"sum", "prod", "max", "min", "avg", "sum of multiples"};
enum { MULTIPLES = 5 };

/* An operation in flight. */
struct operation_in_flight {
  struct communicator *c;
  enum kind kind;
  uint64_t serial, count;
  int type, operation, root, in_place, multiples;
  char *from, *to, *memory[2];
};

/* Of an all-to-allv, every pair of ranks has a count of its own. */
static uint64_t pair_count(const struct operation_in_flight *o, int from, int to) { return o->count * (((uint64_t)from * 7 + (uint64_t)to * 3 + o->serial) % 4) / 3; }

static uint64_t inputs(const struct operation_in_flight *o) {
  uint64_t n = 0;
  switch (o->kind) {
  case K_REDUCE_SCATTER: case K_ALL_TO_ALL: case K_SCATTER: return o->count * (uint64_t)o->c->ranks;
  case K_ALL_TO_ALL_V: for (int r = 0; r < o->c->ranks; r++) n += pair_count(o, o->c->rank, r); return n;
  default: return o->count;
  }
}
static uint64_t outputs(const struct operation_in_flight *o) {
  uint64_t n = 0;
  switch (o->kind) {
  case K_ALL_GATHER: case K_ALL_TO_ALL: return o->count * (uint64_t)o->c->ranks;
  case K_GATHER: return o->c->rank == o->root ? o->count * (uint64_t)o->c->ranks : 0;
  case K_REDUCE: return o->c->rank == o->root ? o->count : 0;
  case K_ALL_TO_ALL_V: for (int r = 0; r < o->c->ranks; r++) n += pair_count(o, r, o->c->rank); return n;
  default: return o->count;
  }
}

/* reduced is the result for an element of all ranks' inputs. */
static int64_t reduced(const struct operation_in_flight *o, uint64_t index) {
  int64_t result = element(o->serial, 0, index);
  for (int r = 1; r < o->c->ranks; r++) {
    int64_t x = element(o->serial, r, index);
    switch (o->operation) {
    case PROD: result *= x; break;
    case MAX: result = x > result ? x : result; break;
    case MIN: result = x < result ? x : result; break;
    default: result += x;
    }
  }
  return o->operation == MULTIPLES ? FACTOR * result : result;
}

/* check compares every element of the result, and what lies behind it. */
static int check(const struct operation_in_flight *o) {
  uint64_t width = type_bytes[o->type], count = outputs(o), wrong = 0, first = 0, block = 0, begin = 0;
  for (uint64_t i = 0; i < count; i++) {
    char want[8];
    int64_t value = 0;
    int previous = (o->c->rank + o->c->ranks - 1) % o->c->ranks;
    switch (o->kind) {
    case K_ALL_REDUCE: case K_REDUCE: value = reduced(o, i); break;
    case K_REDUCE_SCATTER: value = reduced(o, (uint64_t)o->c->rank * o->count + i); break;
    case K_BROADCAST: value = element(o->serial, o->root, i); break;
    case K_ALL_GATHER: case K_GATHER: value = element(o->serial, (int)(i / o->count), i % o->count); break;
    case K_ALL_TO_ALL: value = element(o->serial, (int)(i / o->count), (uint64_t)o->c->rank * o->count + i % o->count); break;
    case K_ALL_TO_ALL_V: {
      while (i >= begin + pair_count(o, (int)block, o->c->rank)) begin += pair_count(o, (int)block++, o->c->rank);
      uint64_t before = 0;
      for (int r = 0; r < o->c->rank; r++) before += pair_count(o, (int)block, r);
      value = element(o->serial, (int)block, before + i - begin);
      break;
    }
    case K_SCATTER: value = element(o->serial, o->root, (uint64_t)o->c->rank * o->count + i); break;
    default: value = element(o->serial, previous, i);
    }
    if (o->operation == AVG && (o->kind == K_ALL_REDUCE || o->kind == K_REDUCE || o->kind == K_REDUCE_SCATTER)) {
      float average = (float)value / (float)o->c->ranks; /* exact, see draw */
      uint32_t bits;
      memcpy(&bits, &average, sizeof bits);
      _Float16 half = (_Float16)average;
      double wide = average;
      switch (o->type) {
      case FLOAT16: memcpy(want, &half, 2); break;
      case FLOAT32: memcpy(want, &average, 4); break;
      case FLOAT64: memcpy(want, &wide, 8); break;
      case BFLOAT16: bits >>= 16, memcpy(want, &bits, 2); break;
      default: value /= o->c->ranks, memcpy(want, &value, width);
      }
    } else {
      encode(o->type, value, want);
    }
    if (memcmp(o->to + i * width, want, width) != 0 && wrong++ == 0) first = i;
  }
  if (wrong > 0)
    return fail("wrong: %" PRIu64 " of %" PRIu64 " elements of %s %s, type %d, operation %s, count %" PRIu64 ", the first is %" PRIu64, wrong, count,
                o->in_place ? "in-place" : "out-of-place", kinds[o->kind], o->type, operations[o->operation], o->count, first);
  for (uint64_t i = 0; i < GUARD; i++) {
    int behind = o->in_place && (o->kind == K_ALL_GATHER || o->kind == K_REDUCE_SCATTER) ? 0 : 1;
    if (behind && (unsigned char)o->to[count * width + i] != POISON) return fail("wrong: %s wrote beyond its result", kinds[o->kind]);
  }
  return 1;
}

/* launch fills the memory of an operation and gives it to RCCL. */
static int launch(struct operation_in_flight *o) {
  struct communicator *c = o->c;
  uint64_t width = type_bytes[o->type], in = inputs(o) * width, out = outputs(o) * width;
  if (!HIP(hipMalloc, (void **)&o->memory[0], in + out + GUARD) || !HIP(hipMalloc, (void **)&o->memory[1], in + out + GUARD)) return 0;
  memset(o->memory[0], POISON, in + out + GUARD);
  memset(o->memory[1], POISON, in + out + GUARD);
  o->from = o->memory[0], o->to = o->memory[1];
  if (o->in_place && o->kind == K_ALL_GATHER) o->from = o->to + (uint64_t)c->rank * in;
  else if (o->in_place && o->kind == K_REDUCE_SCATTER) o->to = o->from + (uint64_t)c->rank * out;
  else if (o->in_place) o->to = o->from;
  for (uint64_t i = 0; i < inputs(o); i++) encode(o->type, element(o->serial, c->rank, i), o->from + i * width);
  int operation = o->operation;
  if (operation == MULTIPLES) {
    char factor[8];
    encode(o->type, FACTOR, factor);
    if (!NCCL(ncclRedOpCreatePreMulSum, &o->multiples, factor, o->type, HOST_SCALAR, c->comm)) return 0;
    operation = o->multiples;
  }
  switch (o->kind) {
  case K_ALL_REDUCE: return NCCL(ncclAllReduce, o->from, o->to, o->count, o->type, operation, c->comm, c->stream);
  case K_REDUCE: return NCCL(ncclReduce, o->from, o->to, o->count, o->type, operation, o->root, c->comm, c->stream);
  case K_REDUCE_SCATTER: return NCCL(ncclReduceScatter, o->from, o->to, o->count, o->type, operation, c->comm, c->stream);
  case K_BROADCAST: return NCCL(ncclBroadcast, o->from, o->to, o->count, o->type, o->root, c->comm, c->stream);
  case K_ALL_GATHER: return NCCL(ncclAllGather, o->from, o->to, o->count, o->type, c->comm, c->stream);
  case K_ALL_TO_ALL: return NCCL(ncclAllToAll, o->from, o->to, o->count, o->type, c->comm, c->stream);
  case K_GATHER: return NCCL(ncclGather, o->from, o->to, o->count, o->type, o->root, c->comm, c->stream);
  case K_SCATTER: return NCCL(ncclScatter, o->from, o->to, o->count, o->type, o->root, c->comm, c->stream);
  case K_ALL_TO_ALL_V: {
    size_t counts[MAX_RANKS], offsets[MAX_RANKS], in_counts[MAX_RANKS], in_offsets[MAX_RANKS], at = 0, in_at = 0;
    for (int r = 0; r < c->ranks; r++) {
      counts[r] = pair_count(o, c->rank, r), offsets[r] = at, at += counts[r];
      in_counts[r] = pair_count(o, r, c->rank), in_offsets[r] = in_at, in_at += in_counts[r];
    }
    return NCCL(ncclAllToAllv, o->from, counts, offsets, o->to, in_counts, in_offsets, o->type, c->comm, c->stream);
  }
  default:
    return NCCL(ncclGroupStart) && NCCL(ncclSend, o->from, o->count, o->type, (c->rank + 1) % c->ranks, c->comm, c->stream) &&
           NCCL(ncclRecv, o->to, o->count, o->type, (c->rank + c->ranks - 1) % c->ranks, c->comm, c->stream) && NCCL(ncclGroupEnd);
  }
}
static void release(struct operation_in_flight *o) {
  if (o->operation == MULTIPLES) ncclRedOpDestroy(o->multiples, o->c->comm);
  hipFree(o->memory[0]);
  hipFree(o->memory[1]);
}

/* Random numbers (xorshift64*), the same at all ranks. */
static uint64_t state;
static uint64_t below(uint64_t limit) {
  state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
  return (state * UINT64_C(0x2545F4914F6CDD1D) >> 11) % limit;
}

static void draw(struct operation_in_flight *o, struct communicator *c, uint64_t serial, uint64_t max_bytes) {
  uint64_t bits = 0;
  while (max_bytes >> (bits + 1)) bits++;
  *o = (struct operation_in_flight){.c = c, .serial = serial, .kind = (enum kind)below(KINDS), .type = (int)below(TYPES), .operation = (int)below(OPERATION_NAMES + 1)};
  uint64_t bytes = below(UINT64_C(1) << (1 + below(bits))); /* all magnitudes alike */
  o->count = bytes / type_bytes[o->type] + 1;
  o->root = (int)below((uint64_t)c->ranks);
  o->in_place = below(3) == 0 && (o->kind == K_ALL_REDUCE || o->kind == K_BROADCAST || o->kind == K_ALL_GATHER || o->kind == K_REDUCE_SCATTER);
  int rounds = c->ranks & (c->ranks - 1);
  if (o->operation == PROD && (o->type == FLOAT16 || o->type == BFLOAT16)) o->operation = SUM; /* too large for them */
  if (o->operation == AVG && rounds && o->type >= FLOAT16) o->operation = SUM;                /* would be rounded */
}

static int run_random(uint64_t seed, uint64_t count, uint64_t max_bytes, const int *chosen, int communicators_chosen) {
  struct operation_in_flight flying[MAX_COMMUNICATORS];
  state = seed * 2 + 1;
  for (uint64_t serial = 0; serial < count;) {
    int launched = 0, good = 1, together = below(3) == 0; /* together: the operations of several communicators in one group */
    if (together) good = NCCL(ncclGroupStart);
    for (; good && launched < communicators_chosen && serial < count; launched++, serial++) {
      draw(&flying[launched], &communicators[chosen[launched]], seed * 131 + serial, max_bytes);
      good = launch(&flying[launched]);
    }
    if (together) good = good && NCCL(ncclGroupEnd);
    for (int i = 0; good && i < launched; i++) good = wait(flying[i].c) && check(&flying[i]);
    if (!good) return 0;
    for (int i = 0; i < launched; i++) release(&flying[i]);
  }
  return 1;
}

/* run_all_reduce measures; what it finds wrong it reports too. */
static int run_all_reduce(struct communicator *c, uint64_t bytes, uint64_t count, char *answer, size_t room) {
  struct operation_in_flight o = {.c = c, .kind = K_ALL_REDUCE, .type = FLOAT32, .operation = SUM, .count = bytes / 4};
  size_t at = 0;
  for (uint64_t i = 0; i < count; i++) {
    o.serial = i;
    if (i == 0 && !(launch(&o) && wait(c) && check(&o))) return 0; /* connects */
    memset(o.to, POISON, bytes);
    struct operation_in_flight tiny = {.c = c, .kind = K_ALL_REDUCE, .type = INT8, .operation = SUM, .count = 1};
    if (!(launch(&tiny) && wait(c))) return 0; /* the ranks begin together */
    double start = now();
    if (!NCCL(ncclAllReduce, o.from, o.to, o.count, o.type, o.operation, c->comm, c->stream) || !wait(c)) return 0;
    at += (size_t)snprintf(answer + at, at < room ? room - at : 0, " %.6f", now() - start);
    release(&tiny);
    o.serial = 0; /* of the input */
    if (!check(&o)) return 0;
  }
  release(&o);
  return 1;
}

static struct communicator *numbered(int number) {
  if (number >= 0 && number < opened && communicators[number].comm) return &communicators[number];
  fail("there is no communicator %d", number);
  return NULL;
}

static int initialize(const char *text, int ranks, int rank) {
  unique_id id;
  if (opened == MAX_COMMUNICATORS || ranks > MAX_RANKS || strlen(text) != 2 * sizeof id) return fail("init: bad arguments");
  for (size_t i = 0; i < sizeof id; i++) {
    unsigned byte;
    if (sscanf(text + 2 * i, "%2x", &byte) != 1) return fail("init: no id");
    id.bytes[i] = (char)byte;
  }
  struct communicator *c = &communicators[opened];
  *c = (struct communicator){.ranks = ranks, .rank = rank};
  if (!HIP(hipStreamCreateWithFlags, &c->stream, 1) || !HIP(hipEventCreate, &c->event)) return 0;
  if (!NCCL(ncclCommInitRank, &c->comm, ranks, id, rank)) return 0;
  opened++;
  return 1;
}

static int end(struct communicator *c, int abort_it) {
  int good = abort_it ? NCCL(ncclCommAbort, c->comm) : NCCL(ncclCommDestroy, c->comm);
  good = good && HIP(hipStreamDestroy, c->stream) && HIP(hipEventDestroy, c->event);
  c->comm = NULL;
  return good;
}

int main(void) {
  static char line[4096], answer[1 << 16];
  setvbuf(stdout, NULL, _IOLBF, 0);
  const char *device = getenv("LAB_DEVICE");
  if (hipSetDevice(device ? atoi(device) : 0) != SUCCESS) return 1;
  while (fgets(line, sizeof line, stdin)) {
    char *words[MAX_COMMUNICATORS + 8] = {0}, *rest = line;
    int count = 0, good = 0;
    while (count < MAX_COMMUNICATORS + 8 && (words[count] = strtok_r(count ? NULL : line, " \n", &rest))) count++;
    if (!count) continue;
    failure[0] = answer[0] = '\0';
    if (strcmp(words[0], "id") == 0) {
      unique_id id;
      if ((good = NCCL(ncclGetUniqueId, &id)))
        for (size_t i = 0; i < sizeof id; i++) sprintf(answer + (i ? 1 : 0) + 2 * i, "%s%02x", i ? "" : " ", (unsigned char)id.bytes[i]);
    } else if (strcmp(words[0], "init") == 0 && count == 4) {
      if ((good = initialize(words[1], atoi(words[2]), atoi(words[3])))) sprintf(answer, " %d", opened - 1);
    } else if (strcmp(words[0], "random") == 0 && count > 4) {
      int chosen[MAX_COMMUNICATORS], n = 0;
      for (good = 1; n < count - 4 && good; n++) good = numbered(chosen[n] = atoi(words[4 + n])) != NULL;
      good = good && run_random(strtoull(words[1], NULL, 10), strtoull(words[2], NULL, 10), strtoull(words[3], NULL, 10), chosen, n);
    } else if (strcmp(words[0], "allreduce") == 0 && count == 4) {
      struct communicator *c = numbered(atoi(words[1]));
      good = c && run_all_reduce(c, strtoull(words[2], NULL, 10), strtoull(words[3], NULL, 10), answer, sizeof answer);
    } else if (strcmp(words[0], "launch") == 0 && count == 3) {
      struct communicator *c = numbered(atoi(words[1]));
      struct operation_in_flight o = {.c = c, .kind = K_ALL_REDUCE, .type = FLOAT32, .operation = SUM, .count = strtoull(words[2], NULL, 10) / 4};
      good = c && launch(&o); /* its memory is kept for RCCL */
    } else if (strcmp(words[0], "flip") == 0) {
      lab_flip_received();
      good = 1;
    } else if ((strcmp(words[0], "abort") == 0 || strcmp(words[0], "destroy") == 0) && count == 2) {
      struct communicator *c = numbered(atoi(words[1]));
      good = c && end(c, words[0][0] == 'a');
    } else {
      fail("no such command: %s", words[0]);
    }
    printf(good ? "ok%s\n" : "failed %s\n", good ? answer : failure);
  }
  return 0;
}
