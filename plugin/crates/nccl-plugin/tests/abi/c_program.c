/* A host in C. The library must have the layout that a C compiler gives ncclNet v12, transcribed here from NCCL 2.30's
 * header. Sends messages from one connection to another within this process and checks every byte. */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void (*logger_call)(int level, unsigned long subsystems, const char *file, int line, const char *format, ...);
typedef struct { int traffic_class; } comm_config;
typedef struct { int count, devices[8]; } virtual_device;
typedef struct {
  char *name, *pci_path;
  uint64_t guid;
  int ptr_support, reg_is_global, force_flush, speed, port;
  float latency;
  int max_comms, max_recvs, device_type, device_version;
  virtual_device virtual;
  size_t max_p2p_bytes, max_coll_bytes;
  int max_multi_request_size;
  int16_t rail, plane;
} properties;
typedef struct {
  const char *name;
  int (*init)(void **context, uint64_t comm_id, comm_config *config, logger_call log, void *profiler);
  int (*devices)(int *count);
  int (*get_properties)(int device, properties *out);
  int (*listen)(void *context, int device, void *handle, void **listener);
  int (*connect)(void *context, int device, void *handle, void **comm, void **offload);
  int (*accept)(void *listener, void **comm, void **offload);
  int (*reg_mr)(void *comm, void *data, size_t size, int type, void **registration);
  int (*reg_mr_dma_buf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **registration);
  int (*dereg_mr)(void *comm, void *registration);
  int (*isend)(void *comm, void *data, size_t size, int tag, void *registration, void *profile, void **request);
  int (*irecv)(void *comm, int n, void **data, size_t *sizes, int *tags, void **registrations, void **profiles, void **request);
  int (*iflush)(void *comm, int n, void **data, int *sizes, void **registrations, void **request);
  int (*test)(void *request, int *done, int *sizes);
  int (*close_send)(void *comm);
  int (*close_recv)(void *comm);
  int (*close_listen)(void *listener);
  int (*get_device_mr)(void *comm, void *registration, void **device_registration);
  int (*irecv_consumed)(void *comm, int n, void *request);
  int (*make_virtual_device)(int *device, virtual_device *of);
  int (*finalize)(void *context);
  int (*set_attributes)(void *context, void *attributes);
} net;

enum { HANDLE = 128, PTR_HOST = 1, MESSAGES = 64, DEPTH = 8, LARGEST = 300000 };

static void log_line(int level, unsigned long subsystems, const char *file, int line, const char *format, ...) {
  va_list arguments;
  (void)subsystems;
  (void)file;
  (void)line;
  if (level > 2) return;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fputc('\n', stderr);
}

#define CALL(call)                                                     \
  do {                                                                 \
    int result = (call);                                               \
    if (result != 0) {                                                 \
      fprintf(stderr, "line %d: %s gave %d\n", __LINE__, #call, result); \
      exit(1);                                                         \
    }                                                                  \
  } while (0)
#define CHECK(condition)                                       \
  do {                                                         \
    if (!(condition)) {                                        \
      fprintf(stderr, "line %d: not %s\n", __LINE__, #condition); \
      exit(1);                                                 \
    }                                                          \
  } while (0)

/* Messages of many lengths, including zero and odd ones. */
static size_t length(int message) { return message % 7 == 0 ? 0 : (size_t)message * 7919 % LARGEST; }
static char byte(int message, size_t at) { return (char)(message * 31 + at * 7 + at / 4096); }

int main(int argc, char **argv) {
  static char sent[DEPTH][LARGEST], received[DEPTH][LARGEST];
  char unaligned[HANDLE + 1], *handle = unaligned + 1;
  void *context = NULL, *listener = NULL, *to = NULL, *from = NULL, *offload = NULL, *out_mr = NULL, *in_mr = NULL;
  void *sends[DEPTH] = {0}, *receives[DEPTH] = {0};
  int count = 0, next_send = 0, next_receive = 0, done_sends = 0, done_receives = 0;
  comm_config config = {-1};
  properties about;
  CHECK(argc == 2);
  alarm(60);
  void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) fprintf(stderr, "%s\n", dlerror());
  CHECK(library != NULL);
  net *plugin = dlsym(library, "ncclNetPlugin_v12");
  CHECK(plugin != NULL && strcmp(plugin->name, "Evenkeel") == 0);
  CALL(plugin->init(&context, 42, &config, log_line, NULL));
  CALL(plugin->devices(&count));
  CHECK(count >= 1);
  memset(&about, 0x5a, sizeof about);
  CALL(plugin->get_properties(0, &about));
  CHECK(strlen(about.name) > 0 && (about.ptr_support & PTR_HOST) && about.speed > 0 && about.max_recvs >= 1);
  CHECK(about.device_type == 0 && about.max_p2p_bytes >= 1 << 20 && about.virtual.count == 1 && about.rail == -1);
  CALL(plugin->listen(context, 0, handle, &listener));
  while (to == NULL || from == NULL) {
    if (to == NULL) CALL(plugin->connect(context, 0, handle, &to, &offload));
    if (from == NULL) CALL(plugin->accept(listener, &from, &offload));
  }
  CALL(plugin->close_listen(listener));
  CALL(plugin->reg_mr(to, sent, sizeof sent, PTR_HOST, &out_mr));
  CALL(plugin->reg_mr(from, received, sizeof received, PTR_HOST, &in_mr));
  while (done_sends < MESSAGES || done_receives < MESSAGES) {
    if (next_receive < MESSAGES && next_receive - done_receives < DEPTH) {
      void *data = received[next_receive % DEPTH], *profile = NULL;
      size_t size = LARGEST;
      int tag = 0;
      CALL(plugin->irecv(from, 1, &data, &size, &tag, &in_mr, &profile, &receives[next_receive % DEPTH]));
      next_receive += receives[next_receive % DEPTH] != NULL;
    }
    if (next_send < MESSAGES && next_send - done_sends < DEPTH) {
      char *data = sent[next_send % DEPTH];
      for (size_t at = 0; at < length(next_send); at++) data[at] = byte(next_send, at);
      CALL(plugin->isend(to, data, length(next_send), 0, out_mr, NULL, &sends[next_send % DEPTH]));
      next_send += sends[next_send % DEPTH] != NULL;
    }
    int done = 0, size = -1;
    if (done_sends < next_send) {
      CALL(plugin->test(sends[done_sends % DEPTH], &done, &size));
      if (done) CHECK(size == (int)length(done_sends));
      done_sends += done;
    }
    done = 0;
    if (done_receives < next_receive) {
      CALL(plugin->test(receives[done_receives % DEPTH], &done, &size));
      if (done) {
        CHECK(size == (int)length(done_receives));
        for (size_t at = 0; at < length(done_receives); at++) CHECK(received[done_receives % DEPTH][at] == byte(done_receives, at));
      }
      done_receives += done;
    }
  }
  CALL(plugin->dereg_mr(to, out_mr));
  CALL(plugin->dereg_mr(from, in_mr));
  CALL(plugin->close_send(to));
  CALL(plugin->close_recv(from));
  CALL(plugin->finalize(context));
  CHECK(dlclose(library) == 0);
  printf("%d messages\n", done_receives);
  return 0;
}
