/* One rank of an all-reduce over real NCCL, on the first GPU.
 *
 * For every type, operation and size it reduces, checks every element of the result, and prints one line of JSON. NCCL and
 * the CUDA driver are opened at run time, so that this builds without either. The functions used are declared here
 * as in nccl.h (2.30) and in cuda.h (13.0); they have not changed in years.
 *
 * Every failure is one line on standard error, and the exit status is its kind. Everything has a timeout. */
#include <dlfcn.h>
#include <getopt.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { FAILED = 1, MISSING = 2, TIMED_OUT = 3, WRONG = 4 }; /* exit statuses */

/* cuda.h; device memory is an address, but no pointer here. */
typedef uint64_t device_memory;
enum { CUDA_SUCCESS = 0, CUDA_ERROR_NOT_READY = 600, COMPUTE_CAPABILITY_MAJOR = 75 };
static struct {
  int (*cuInit)(unsigned flags);
  int (*cuDriverGetVersion)(int *version);
  int (*cuDeviceGet)(int *device, int ordinal);
  int (*cuDeviceGetName)(char *name, int length, int device);
  int (*cuDeviceGetAttribute)(int *value, int attribute, int device);
  int (*cuDevicePrimaryCtxRetain)(void **context, int device);
  int (*cuCtxSetCurrent)(void *context);
  int (*cuMemAlloc_v2)(device_memory *memory, size_t bytes);
  int (*cuMemsetD8Async)(device_memory memory, unsigned char value, size_t bytes, void *stream);
  int (*cuMemcpyHtoDAsync_v2)(device_memory to, const void *from, size_t bytes, void *stream);
  int (*cuMemcpyDtoHAsync_v2)(void *to, device_memory from, size_t bytes, void *stream);
  int (*cuStreamCreate)(void **stream, unsigned flags);
  int (*cuStreamQuery)(void *stream);
  int (*cuGetErrorName)(int error, const char **name);
} cuda;

/* nccl.h */
typedef struct { char bytes[128]; } unique_id;
enum { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7, SUM = 0, PROD = 1, MAX = 2, MIN = 3, AVG = 4 };
enum { INT32 = 2, INT8 = 0, BFLOAT16 = 9, FLOAT8E4M3 = 10, TYPES = 12, FIRST_WITH_FLOAT8 = 22400 };
static struct {
  int (*ncclGetVersion)(int *version);
  int (*ncclGetUniqueId)(unique_id *id);
  int (*ncclCommInitRank)(void **comm, int ranks, unique_id id, int rank);
  int (*ncclAllReduce)(const void *from, void *to, size_t count, int type, int operation, void *comm, void *stream);
  int (*ncclCommGetAsyncError)(void *comm, int *error);
  int (*ncclCommDestroy)(void *comm);
  int (*ncclCommAbort)(void *comm);
  const char *(*ncclGetErrorString)(int error);
  const char *(*ncclGetLastError)(void *comm);
} nccl;

/* The index is the type's number in NCCL. The numbers of bits of an integer are 0. */
static const struct { const char *name; unsigned bytes, exponent, mantissa; } types[TYPES] = {
    {"int8", 1, 0, 0},     {"uint8", 1, 0, 0},    {"int32", 4, 0, 0},     {"uint32", 4, 0, 0},
    {"int64", 8, 0, 0},    {"uint64", 8, 0, 0},   {"float16", 2, 5, 10},  {"float32", 4, 8, 23},
    {"float64", 8, 11, 52}, {"bfloat16", 2, 8, 7}, {"float8e4m3", 1, 4, 3}, {"float8e5m2", 1, 5, 2},
};
static const char *operations[] = {"sum", "prod", "max", "min", "avg"};

static struct {
  const char *nccl, *id, *only; /* only: sums of this type */
  long rank, ranks, min, max, step, iterations, timeout, probe, forever;
} options = {"libnccl.so.2", NULL, NULL, 0, 2, 8, 256L << 20, 4, 5, 120, 0, 0};

/* PERIOD is a prime, and so divides no chunk: data in a wrong place has a wrong value there. */
enum { PERIOD = 8191, MAX_RANKS = 8, WIDEST = 8, EIGHTHS = 8, TO_ABORT = 30 };
static unsigned char inputs[PERIOD * WIDEST], results[PERIOD * WIDEST];

static void *comm, *stream;
static char doing[128] = "start"; /* the current step, for messages */

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* timed_out exits from a call that does not return. */
static void timed_out(int signal_number) {
  static const char before[] = "allreduce: no end of: ", after[] = "\n";
  ssize_t ignored = write(2, before, sizeof before - 1) + write(2, doing, strlen(doing)) + write(2, after, 1);
  (void)signal_number, (void)ignored;
  _exit(TIMED_OUT);
}

/* fail prints the current step and its failure in one line, and exits. */
static void fail(int status, const char *format, ...) __attribute__((noreturn, format(printf, 2, 3)));
static void fail(int status, const char *format, ...) {
  char text[2048];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  text[strcspn(text, "\n")] = '\0';
  fprintf(stderr, "allreduce: %s: %s\n", doing, text);
  if (comm) {
    snprintf(doing, sizeof doing, "ncclCommAbort");
    alarm(TO_ABORT);
    nccl.ncclCommAbort(comm);
  }
  _exit(status);
}

/* begin names the next step, and starts its timeout. */
static void begin(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void begin(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(doing, sizeof doing, format, arguments);
  va_end(arguments);
  alarm((unsigned)options.timeout + TO_ABORT); /* finish has a better message and times out first */
}

static void check_cuda(const char *call, int error) {
  const char *name = "unknown error";
  if (error == CUDA_SUCCESS) return;
  cuda.cuGetErrorName(error, &name);
  fail(FAILED, "%s: %s (%d)", call, name, error);
}
static void check_nccl(const char *call, int error) {
  if (error == NCCL_SUCCESS) return;
  fail(FAILED, "%s: %s (%d): %s", call, nccl.ncclGetErrorString(error), error, nccl.ncclGetLastError(comm));
}
#define CUDA(call, ...) check_cuda(#call, cuda.call(__VA_ARGS__))
#define NCCL(call, ...) check_nccl(#call, nccl.call(__VA_ARGS__))

/* finish waits for the stream, and meanwhile checks NCCL for an error. */
static void finish(void) {
  for (double deadline = now() + (double)options.timeout;;) {
    int error = cuda.cuStreamQuery(stream), failure = NCCL_SUCCESS;
    if (error == CUDA_SUCCESS) return;
    if (error != CUDA_ERROR_NOT_READY) check_cuda("cuStreamQuery", error);
    NCCL(ncclCommGetAsyncError, comm, &failure);
    if (failure != NCCL_IN_PROGRESS) check_nccl("NCCL reports", failure);
    if (now() > deadline) fail(TIMED_OUT, "not done after %ld s, and NCCL reports no error", options.timeout);
    nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
  }
}

/* encode writes a number, given in eighths, in a type that can hold it exactly. */
static void encode(int type, uint64_t eighths, unsigned char *to) {
  uint64_t bits = eighths / EIGHTHS;
  unsigned mantissa = types[type].mantissa;
  if (mantissa > 0 && eighths > 0) {
    unsigned power = 63 - (unsigned)__builtin_clzll(eighths);
    uint64_t rest = eighths - (UINT64_C(1) << power), bias = (UINT64_C(1) << (types[type].exponent - 1)) - 1;
    bits = (power - 3 + bias) << mantissa | (power > mantissa ? rest >> (power - mantissa) : rest << (mantissa - power));
  }
  memcpy(to, &bits, types[type].bytes); /* little-endian, as GPUs and their hosts are */
}

/* input is a rank's element: so small that every type holds the result of all ranks exactly, 8 for sums. */
static uint64_t input(int operation, long rank, uint32_t element) {
  uint32_t mixed = (element * MAX_RANKS + (uint32_t)rank + 1) * UINT32_C(2654435761) >> 16;
  return operation == PROD ? 1 + mixed % 2 : mixed % (uint32_t)(8 / options.ranks + 1);
}

static void prepare(int type, int operation) {
  for (uint32_t i = 0; i < PERIOD; i++) {
    uint64_t result = input(operation, 0, i);
    for (long r = 1; r < options.ranks; r++) {
      uint64_t x = input(operation, r, i);
      switch (operation) {
      case PROD: result *= x; break;
      case MAX: result = x > result ? x : result; break;
      case MIN: result = x < result ? x : result; break;
      default: result += x;
      }
    }
    result *= EIGHTHS;
    if (operation == AVG) result /= (uint64_t)options.ranks; /* NCCL cuts averages of integers, as encode does */
    encode(type, EIGHTHS * input(operation, options.rank, i), inputs + i * types[type].bytes);
    encode(type, result, results + i * types[type].bytes);
  }
}

/* check compares every element with what it must be. */
static void check(const unsigned char *got, size_t count, size_t width) {
  size_t wrong = 0, first = 0;
  for (size_t i = 0; i < count; i += PERIOD) {
    size_t n = count - i < PERIOD ? count - i : PERIOD;
    if (memcmp(got + i * width, results, n * width) == 0) continue;
    for (size_t k = 0; k < n; k++) {
      if (memcmp(got + (i + k) * width, results + k * width, width) == 0) continue;
      if (wrong++ == 0) first = i + k;
    }
  }
  if (wrong == 0) return;
  uint64_t is = 0, must = 0;
  memcpy(&is, got + first * width, width);
  memcpy(&must, results + first % PERIOD * width, width);
  fail(WRONG, "%zu of %zu elements are wrong, first element %zu: 0x%llx, must be 0x%llx", wrong, count, first,
       (unsigned long long)is, (unsigned long long)must);
}

static int by_size(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* reduce measures one row: the median time of an all-reduce. */
static void reduce(int type, int operation, size_t bytes, device_memory from, device_memory to, unsigned char *host) {
  double seconds[100];
  size_t count = bytes / types[type].bytes;
  for (long i = 0; i < options.iterations; i++) {
    begin("rank %ld: all-reduce of %s, %s, %zu bytes", options.rank, types[type].name, operations[operation], bytes);
    /* A tiny one first, so that the time of the other one is not that of waiting for a peer that still compares. */
    NCCL(ncclAllReduce, (void *)from, (void *)to, 1, INT8, SUM, comm, stream);
    CUDA(cuMemsetD8Async, to, 0xA5, bytes, stream); /* no result: of any type, less than 0 or more than 100 */
    finish();
    double start = now();
    NCCL(ncclAllReduce, (void *)from, (void *)to, count, type, operation, comm, stream);
    finish();
    seconds[i] = now() - start;
    CUDA(cuMemcpyDtoHAsync_v2, host, to, bytes, stream);
    finish();
    check(host, count, types[type].bytes);
  }
  qsort(seconds, (size_t)options.iterations, sizeof *seconds, by_size);
  printf("{\"type\":\"%s\",\"op\":\"%s\",\"bytes\":%zu,\"seconds\":%.9f}\n", types[type].name, operations[operation], bytes,
         seconds[options.iterations / 2]);
}

/* rows runs all types, operations and sizes once. */
static void rows(int version, int capability, device_memory from, device_memory to, unsigned char *host) {
  for (int type = 0; type < TYPES; type++) {
    if (options.only && strcmp(options.only, types[type].name) != 0) continue;
    if (type >= FLOAT8E4M3 && (version < FIRST_WITH_FLOAT8 || capability < 9)) {
      printf("{\"type\":\"%s\",\"op\":\"sum\",\"skipped\":\"needs NCCL 2.24 and compute capability 9.0\"}\n", types[type].name);
      continue;
    }
    for (int operation = SUM; operation <= AVG; operation++) {
      if (operation != SUM && (options.only || (type != INT32 && type != BFLOAT16))) continue; /* one integer, one type of gradients */
      begin("rank %ld: data of %s, %s", options.rank, types[type].name, operations[operation]);
      prepare(type, operation);
      size_t period = (size_t)PERIOD * types[type].bytes, all = (size_t)options.max;
      for (size_t at = 0; at < all; at += period) memcpy(host + at, inputs, all - at < period ? all - at : period);
      CUDA(cuMemcpyHtoDAsync_v2, from, host, all, stream);
      finish();
      for (size_t bytes = (size_t)options.min; bytes < all; bytes *= (size_t)options.step)
        reduce(type, operation, bytes, from, to, host);
      reduce(type, operation, all, from, to, host);
    }
  }
}

static void *library(const char *name, const char *remedy) {
  void *handle = dlopen(name, RTLD_NOW);
  if (!handle) fail(MISSING, "%s; %s", dlerror(), remedy);
  return handle;
}
static void *symbol(void *handle, const char *name) {
  void *address = dlsym(handle, name);
  if (!address) fail(MISSING, "%s; a newer version has it", dlerror());
  return address;
}
#define LOAD(of, name) (*(void **)&of.name = symbol(handle, #name))

static void load(void) {
  static const char driver[] = "there is no NVIDIA driver here: run this where there is a GPU and its driver";
  static const char pip[] = "install NCCL (pip install nvidia-nccl-cu13) or name its folder in LD_LIBRARY_PATH";
  snprintf(doing, sizeof doing, "CUDA driver");
  void *handle = library("libcuda.so.1", driver);
  LOAD(cuda, cuInit), LOAD(cuda, cuDriverGetVersion), LOAD(cuda, cuDeviceGet), LOAD(cuda, cuDeviceGetName);
  LOAD(cuda, cuDeviceGetAttribute), LOAD(cuda, cuDevicePrimaryCtxRetain), LOAD(cuda, cuCtxSetCurrent);
  LOAD(cuda, cuMemAlloc_v2), LOAD(cuda, cuMemsetD8Async), LOAD(cuda, cuMemcpyHtoDAsync_v2), LOAD(cuda, cuMemcpyDtoHAsync_v2);
  LOAD(cuda, cuStreamCreate), LOAD(cuda, cuStreamQuery), LOAD(cuda, cuGetErrorName);
  const char *name = "unknown error";
  int error = cuda.cuInit(0), device;
  if (error == CUDA_SUCCESS) error = cuda.cuDeviceGet(&device, 0);
  if (error != CUDA_SUCCESS) {
    cuda.cuGetErrorName(error, &name);
    fail(MISSING, "no usable GPU: %s (%d): see the output of nvidia-smi", name, error);
  }
  snprintf(doing, sizeof doing, "NCCL");
  handle = library(options.nccl, pip);
  LOAD(nccl, ncclGetVersion), LOAD(nccl, ncclGetUniqueId), LOAD(nccl, ncclCommInitRank), LOAD(nccl, ncclAllReduce);
  LOAD(nccl, ncclCommGetAsyncError), LOAD(nccl, ncclCommDestroy), LOAD(nccl, ncclCommAbort);
  LOAD(nccl, ncclGetErrorString), LOAD(nccl, ncclGetLastError);
}

/* bootstrap gives every rank the id that rank 0 creates, through a file that is renamed when it is complete. */
static unique_id bootstrap(void) {
  unique_id id;
  char draft[4096];
  FILE *file = NULL;
  begin("rank %ld: id in %s", options.rank, options.id);
  if (options.rank == 0) {
    NCCL(ncclGetUniqueId, &id);
    snprintf(draft, sizeof draft, "%s.draft", options.id);
    if (!(file = fopen(draft, "w")) || fwrite(&id, sizeof id, 1, file) != 1 || fclose(file) != 0 ||
        rename(draft, options.id) != 0)
      fail(FAILED, "cannot be written: %m");
    return id;
  }
  for (double deadline = now() + (double)options.timeout; !(file = fopen(options.id, "r"));) {
    if (now() > deadline) fail(TIMED_OUT, "rank 0 made none within %ld s", options.timeout);
    nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
  }
  if (fread(&id, sizeof id, 1, file) != 1) fail(FAILED, "is too short");
  fclose(file);
  return id;
}

static void parse(int argc, char **argv) {
  static const struct { const char *name; long *to, min, max; } numbers[] = {
      {"rank", &options.rank, 0, MAX_RANKS - 1}, {"ranks", &options.ranks, 2, MAX_RANKS},
      {"min", &options.min, 8, 1L << 32},
      {"max", &options.max, 8, 1L << 32}, {"step", &options.step, 2, 1024}, {"iterations", &options.iterations, 1, 100},
      {"timeout", &options.timeout, 1, 3600}, {"probe", &options.probe, 0, 1}, {"forever", &options.forever, 0, 1}};
  enum { NUMBERS = sizeof numbers / sizeof *numbers, NCCL_PATH = NUMBERS, ID_PATH, ONLY };
  struct option names[ONLY + 2] = {
      [NCCL_PATH] = {"nccl", 1, NULL, NCCL_PATH}, [ID_PATH] = {"id", 1, NULL, ID_PATH}, [ONLY] = {"only", 1, NULL, ONLY}};
  for (int i = 0; i < NUMBERS; i++) names[i] = (struct option){numbers[i].name, 1, NULL, i};
  opterr = 0;
  for (int which; (which = getopt_long(argc, argv, "", names, NULL)) != -1;) {
    char *end = NULL;
    if (which == '?') fail(FAILED, "%s: no option, or one without its value", argv[optind - 1]);
    if (which == NCCL_PATH) options.nccl = optarg;
    if (which == ID_PATH) options.id = optarg;
    if (which == ONLY) options.only = optarg;
    if (which >= NUMBERS) continue;
    *numbers[which].to = strtol(optarg, &end, 10);
    if (end == optarg || *end || *numbers[which].to < numbers[which].min || *numbers[which].to > numbers[which].max)
      fail(FAILED, "--%s %s: a number from %ld to %ld", numbers[which].name, optarg, numbers[which].min, numbers[which].max);
  }
  /* With another number of ranks an average would not be exact. */
  if (options.ranks & (options.ranks - 1) || options.rank >= options.ranks)
    fail(FAILED, "--ranks: 2, 4 or 8, and --rank below it");
  if (options.min > options.max || options.min % WIDEST || options.max % WIDEST)
    fail(FAILED, "--min and --max: multiples of %d, in that order", WIDEST);
  for (int type = 0; options.only && strcmp(options.only, types[type].name) != 0;)
    if (++type == TYPES) fail(FAILED, "--only %s: no type, such as float32", options.only);
  if (!options.probe && (!options.id || optind != argc))
    fail(FAILED, "--id FILE, the same for all ranks, is needed, and no argument");
}

int main(int argc, char **argv) {
  int version = 0, driver = 0, device = 0, capability = 0;
  char name[256] = "";
  void *context = NULL;
  device_memory from = 0, to = 0;
  signal(SIGALRM, timed_out);
  setvbuf(stdout, NULL, _IOLBF, 0);
  parse(argc, argv);
  alarm((unsigned)options.timeout + TO_ABORT);
  load();
  begin("rank %ld: set-up", options.rank);
  NCCL(ncclGetVersion, &version);
  CUDA(cuDriverGetVersion, &driver);
  CUDA(cuDeviceGetName, name, sizeof name - 1, device);
  CUDA(cuDeviceGetAttribute, &capability, COMPUTE_CAPABILITY_MAJOR, device);
  if (options.probe) {
    printf("{\"nccl\":%d,\"cuda\":%d,\"gpu\":\"%s\"}\n", version, driver, name);
    return 0;
  }
  unsigned char *host = malloc((size_t)options.max);
  if (!host) fail(FAILED, "%ld bytes of memory: %m", options.max);
  CUDA(cuDevicePrimaryCtxRetain, &context, device);
  CUDA(cuCtxSetCurrent, context);
  CUDA(cuMemAlloc_v2, &from, (size_t)options.max);
  CUDA(cuMemAlloc_v2, &to, (size_t)options.max);
  CUDA(cuStreamCreate, &stream, 0);
  unique_id id = bootstrap();
  begin("rank %ld: a communicator of %ld ranks", options.rank, options.ranks);
  NCCL(ncclCommInitRank, &comm, (int)options.ranks, id, (int)options.rank);
  do rows(version, capability, from, to, host);
  while (options.forever);
  begin("rank %ld: ncclCommDestroy", options.rank);
  NCCL(ncclCommDestroy, comm);
  return 0;
}
