/* A fake of the CUDA driver and of NCCL in one library, to test the harness where there is no GPU. Device memory is host
 * memory, and ranks share a file that all map. It shares no code with the harness: the compiler converts numbers.
 * FAKE is the fault to inject. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { SLOT = 1 << 20, LOST = 6 };
typedef struct { char path[128]; } unique_id;
typedef struct {
  atomic_int step[8], process[8];
  unsigned char data[8][SLOT];
} shared_memory;
static shared_memory *all;
static int me, ranks, steps, calls, stuck, failure;
static int servers[8], server_count; /* connections to reduction servers, which only show whether these run */

static int faulty(const char *kind) { return getenv("FAKE") && strcmp(getenv("FAKE"), kind) == 0; }

int cuInit(unsigned flags) { return flags + faulty("no GPU") ? 100 : 0; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char *name, int length, int device) { return snprintf(name, (size_t)length, "fake GPU %d", device) < 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = 9 - faulty("old GPU"), attribute != 75 || device; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = &all, device; }
int cuCtxSetCurrent(void *context) { return context != &all; }
int cuMemAlloc_v2(uint64_t *memory, size_t bytes) { return (*memory = (uint64_t)malloc(bytes)) == 0; }
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t n, void *stream) { return memset((void *)to, value, n), stream != &all; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t n, void *stream) { return memcpy((void *)to, from, n), stream != &all; }
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t n, void *stream) { return memcpy(to, (void *)from, n), stream != &all; }
int cuStreamCreate(void **stream, unsigned flags) { return *stream = &all, flags != 0; }
int cuStreamQuery(void *stream) { return stream != &all ? 400 : stuck ? 600 : 0; }
int cuGetErrorName(int error, const char **name) { return *name = error == 100 ? "FAKE_NO_DEVICE" : "FAKE_ERROR", 0; }

int ncclGetVersion(int *version) { return *version = faulty("old NCCL") ? 22005 : 23007, 0; }
const char *ncclGetErrorString(int error) { return error == LOST ? "remote error" : "internal error"; }
const char *ncclGetLastError(void *comm) { return comm ? "injected failure" : "no communicator"; }
int ncclCommGetAsyncError(void *comm, int *error) { return *error = failure, comm == NULL; }
int ncclCommDestroy(void *comm) { return comm == NULL; }
int ncclCommAbort(void *comm) { return comm == NULL; }

int ncclGetUniqueId(unique_id *id) {
  memset(id, 0, sizeof *id);
  snprintf(id->path, sizeof id->path, "%s/ranks-XXXXXX", getenv("FAKE_FOLDER"));
  int file = mkstemp(id->path);
  return file < 0 || ftruncate(file, sizeof(shared_memory)) || close(file);
}

static void sleep_for_ever(void) {
  sigset_t every;
  sigfillset(&every);
  sigprocmask(SIG_BLOCK, &every, NULL);
  for (;;) pause();
}

/* barrier waits until all ranks have reached this step; 0 if one has died. */
static int barrier(void) {
  atomic_store(&all->step[me], ++steps);
  for (int r = 0; r < ranks; r++)
    while (atomic_load(&all->step[r]) < steps) {
      int process = atomic_load(&all->process[r]);
      if (process && kill(process, 0) && errno == ESRCH) return 0;
      nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
  return 1;
}

static int join_servers(void) {
  const char *list = getenv("EVENKEEL_REDUCTION_SERVERS");
  for (char host[64]; list && *list; list += strcspn(list, ","), list += *list == ',') {
    unsigned port = 0;
    struct sockaddr_in to = {.sin_family = AF_INET};
    if (sscanf(list, "%63[0-9.]:%u", host, &port) != 2 || inet_pton(AF_INET, host, &to.sin_addr) != 1) return 0;
    to.sin_port = htons((uint16_t)port);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to)) return 0;
    servers[server_count++] = fd;
  }
  return 1;
}

static int server_is_lost(void) {
  char byte;
  for (int i = 0; i < server_count; i++)
    if (recv(servers[i], &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || errno != EAGAIN) return 1;
  return 0;
}

int ncclCommInitRank(void **comm, int n, unique_id id, int rank) {
  int file = open(id.path, O_RDWR);
  all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (all == MAP_FAILED) return 2;
  me = rank, ranks = n;
  atomic_store(&all->process[me], getpid());
  FILE *log = fopen(getenv("NCCL_DEBUG_FILE"), "w");
  const char *network = getenv("NCCL_NET") ? getenv("NCCL_NET") : faulty("fallback") ? "Socket" : "Evenkeel";
  if (!join_servers()) return 2;
  const char *via = server_count && !faulty("rings instead") ? "host:1:1 [0] NCCL INFO CollNet 00/0 : 0 [receive] via COLLNET/Evenkeel/0\n" : "";
  char space[64] = "";
  if (readlink("/proc/self/ns/net", space, sizeof space - 1) < 0) return 2;
  if (!log || fprintf(log, "host:1:1 [0] NCCL INFO Using network %s\n%sin %s by %s\n", network, via, space, getenv("NCCL_SOCKET_IFNAME")) < 0 || fclose(log)) return 2;
  if (faulty("no output")) sleep_for_ever();
  *comm = all;
  return barrier() ? 0 : LOST;
}

static double small_float(unsigned char bits) { /* e4m3 */
  int exponent = bits >> 3 & 15;
  double value = (exponent ? 1 : 0) + (bits & 7) / 8.0;
  if (exponent == 0) exponent = 1;
  for (; exponent > 7; exponent--) value *= 2;
  for (; exponent < 7; exponent++) value /= 2;
  return bits >> 7 ? -value : value;
}

#define NUMBERS(X) X(0, int8_t) X(1, uint8_t) X(2, int32_t) X(3, uint32_t) X(4, int64_t) X(5, uint64_t) X(6, _Float16) X(7, float) X(8, double)
static size_t width(int type) {
#define WIDTH(t, c) if (type == t) return sizeof(c);
  NUMBERS(WIDTH)
  return type == 9 ? 2 : 1;
}
static double get(const unsigned char *from, int type) {
#define GET(t, c) if (type == t) { c x; memcpy(&x, from, sizeof x); return (double)x; }
  NUMBERS(GET)
  unsigned char wide[4] = {0};
  _Float16 half;
  float whole;
  if (type == 10) return small_float(*from);
  if (type == 11) return wide[1] = *from, memcpy(&half, wide, 2), (double)half;
  memcpy(wide + 2, from, 2);
  return memcpy(&whole, wide, 4), (double)whole;
}
static void put(unsigned char *to, int type, double value) {
#define PUT(t, c) if (type == t) { c x = (c)value; memcpy(to, &x, sizeof x); return; }
  NUMBERS(PUT)
  _Float16 half = (_Float16)value;
  float whole = (float)value;
  if (type == 9) memcpy(to, (unsigned char *)&whole + 2, 2);
  if (type == 11) memcpy(to, (unsigned char *)&half + 1, 1);
  if (type == 10) for (*to = 0; *to < 0x7f && small_float(*to) != value;) ++*to;
}

static int lost(void) {
  if (faulty("loss ignored")) sleep_for_ever();
  return stuck = 1, failure = faulty("loss not reported") ? 0 : LOST, 0;
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, void *comm, void *stream) {
  size_t bytes = count * width(type);
  if (comm != all || !stream || bytes > SLOT) return 4;
  calls++;
  if (faulty("error") && calls == 9 && me == 1) return 3;
  if (faulty("late error") && calls == 9) return stuck = 1, failure = LOST, 0;
  if (faulty("hang") && calls == 9) return stuck = 1, 0;
  if (faulty("crash") && calls == 9 && me == 1) abort();
  memcpy(all->data[me], from, bytes);
  if (!barrier()) return lost();
  if (server_is_lost()) return faulty("server loss not reported") ? (stuck = 1, 0) : lost();
  for (size_t i = 0; i < count; i++) {
    double x = get(all->data[0] + i * width(type), type);
    for (int r = 1; r < ranks; r++) {
      double y = get(all->data[r] + i * width(type), type);
      x = op == 1 ? x * y : op == 2 ? (x > y ? x : y) : op == 3 ? (x < y ? x : y) : x + y;
    }
    put((unsigned char *)to + i * width(type), type, op == 4 ? x / ranks : x);
  }
  if (faulty("wrong element") && count > 5000 && me == 1) ((unsigned char *)to)[5000 * width(type)] ^= 1;
  if (faulty("wrong place") && count > 16384) memcpy(to, (unsigned char *)to + 8192 * width(type), 8192 * width(type));
  return barrier() ? 0 : lost();
}
