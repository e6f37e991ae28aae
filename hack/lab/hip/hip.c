/* libamdhip64 for tests: host memory plays device memory, and each stream is a thread. It has what RCCL imports, and only RCCL's
 * kernels can be launched. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lab.h"

typedef enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_READY = 600, NOT_SUPPORTED = 801 } hipError_t;

/* An event counts how often it was recorded, and the last of these that its stream has come to. */
struct event { uint64_t recorded, reached; };
typedef struct event *hipEvent_t;

struct task {
  enum { KERNEL, COPY, FILL, RECORD, WAIT } kind;
  union {
    struct { const void *communicator; uint64_t channels; const void *work; } kernel;
    struct { void *to; const void *from; int value; size_t bytes; } memory;
    struct { hipEvent_t event; uint64_t count; } mark;
  };
  struct task *next;
};

struct stream {
  pthread_t thread;
  struct task *first, **last;
  int busy, ending;
};
typedef struct stream *hipStream_t;

/* One lock for all: the work itself is done without it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct stream *default_stream;
static __thread int device;
static __thread hipError_t last_error;

static hipError_t result(hipError_t error) {
  if (error != SUCCESS) last_error = error;
  return error;
}

static void run(struct task *task) {
  switch (task->kind) {
  case KERNEL: lab_run_kernel(task->kernel.communicator, task->kernel.channels, task->kernel.work); break;
  case COPY: memmove(task->memory.to, task->memory.from, task->memory.bytes); break;
  case FILL: memset(task->memory.to, task->memory.value, task->memory.bytes); break;
  case RECORD:
    pthread_mutex_lock(&lock);
    if (task->mark.event->reached < task->mark.count) task->mark.event->reached = task->mark.count;
    pthread_mutex_unlock(&lock);
    break;
  case WAIT:
    pthread_mutex_lock(&lock);
    while (task->mark.event->reached < task->mark.count) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    break;
  }
}

static void *stream_thread(void *argument) {
  struct stream *stream = argument;
  pthread_setname_np(pthread_self(), "hip-stream");
  pthread_mutex_lock(&lock);
  for (;;) {
    while (!stream->first && !stream->ending) pthread_cond_wait(&changed, &lock);
    struct task *task = stream->first;
    if (!task) break;
    if (!(stream->first = task->next)) stream->last = &stream->first;
    stream->busy = 1;
    pthread_mutex_unlock(&lock);
    run(task);
    free(task);
    pthread_mutex_lock(&lock);
    stream->busy = 0;
    pthread_cond_broadcast(&changed);
  }
  pthread_mutex_unlock(&lock);
  return NULL;
}

static struct stream *new_stream(void) {
  struct stream *stream = calloc(1, sizeof *stream);
  if (!stream) return NULL;
  stream->last = &stream->first;
  if (pthread_create(&stream->thread, NULL, stream_thread, stream) != 0) {
    free(stream);
    return NULL;
  }
  return stream;
}

/* enqueue appends a copy of the task. Stream NULL is the default stream, which here does not wait for the others. */
static hipError_t enqueue(hipStream_t stream, struct task task) {
  struct task *copy = malloc(sizeof *copy);
  if (!copy) return result(OUT_OF_MEMORY);
  *copy = task;
  copy->next = NULL;
  pthread_mutex_lock(&lock);
  if (!stream && !default_stream) default_stream = new_stream();
  if (!stream) stream = default_stream;
  if (stream) {
    if (copy->kind == RECORD) copy->mark.count = ++copy->mark.event->recorded;
    if (copy->kind == WAIT) copy->mark.count = copy->mark.event->recorded;
    *stream->last = copy;
    stream->last = &copy->next;
    pthread_cond_broadcast(&changed);
  } else {
    free(copy);
  }
  pthread_mutex_unlock(&lock);
  return result(stream ? SUCCESS : OUT_OF_MEMORY);
}

/* Streams and events. */

hipError_t hipStreamCreateWithFlags(hipStream_t *stream, unsigned flags) {
  (void)flags;
  *stream = new_stream();
  return result(*stream ? SUCCESS : OUT_OF_MEMORY);
}

hipError_t hipStreamSynchronize(hipStream_t stream) {
  pthread_mutex_lock(&lock);
  if (!stream) stream = default_stream;
  while (stream && (stream->first || stream->busy)) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

hipError_t hipStreamDestroy(hipStream_t stream) {
  if (!stream) return result(INVALID_VALUE);
  pthread_mutex_lock(&lock);
  stream->ending = 1;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  pthread_join(stream->thread, NULL);
  free(stream);
  return SUCCESS;
}

hipError_t hipEventCreateWithFlags(hipEvent_t *event, unsigned flags) {
  (void)flags;
  *event = calloc(1, sizeof **event);
  return result(*event ? SUCCESS : OUT_OF_MEMORY);
}
hipError_t hipEventCreate(hipEvent_t *event) { return hipEventCreateWithFlags(event, 0); }

hipError_t hipEventDestroy(hipEvent_t event) {
  free(event);
  return SUCCESS;
}

hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
  return enqueue(stream, (struct task){.kind = RECORD, .mark = {.event = event}});
}

hipError_t hipEventQuery(hipEvent_t event) {
  pthread_mutex_lock(&lock);
  int reached = event->reached >= event->recorded;
  pthread_mutex_unlock(&lock);
  return reached ? SUCCESS : NOT_READY;
}

hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags) {
  (void)flags;
  return enqueue(stream, (struct task){.kind = WAIT, .mark = {.event = event}});
}

/* Kernels. The arguments are copied at the launch, as their owner changes them afterwards. */

struct dim3 { uint32_t x, y, z; };

hipError_t hipLaunchKernel(const void *function, struct dim3 blocks, struct dim3 threads, void **arguments, size_t shared, hipStream_t stream) {
  (void)function, (void)blocks, (void)threads, (void)shared;
  return enqueue(stream, (struct task){.kind = KERNEL, .kernel = {*(void **)arguments[0], *(uint64_t *)arguments[1], *(void **)arguments[2]}});
}

hipError_t hipExtLaunchKernel(const void *function, struct dim3 blocks, struct dim3 threads, void **arguments, size_t shared, hipStream_t stream, hipEvent_t start, hipEvent_t stop, int flags) {
  (void)flags;
  hipError_t error = start ? hipEventRecord(start, stream) : SUCCESS;
  if (error == SUCCESS) error = hipLaunchKernel(function, blocks, threads, arguments, shared, stream);
  if (error == SUCCESS && stop) error = hipEventRecord(stop, stream);
  return error;
}

hipError_t hipFuncGetAttributes(void *attributes, const void *function) { (void)attributes, (void)function; return SUCCESS; }
hipError_t hipFuncSetAttribute(const void *function, int attribute, int value) { (void)function, (void)attribute, (void)value; return SUCCESS; }
hipError_t hipThreadExchangeStreamCaptureMode(int *mode) { (void)mode; return SUCCESS; }

/* The code for GPUs inside RCCL is registered, and never read. */
static void *fat_binary;
void **__hipRegisterFatBinary(const void *data) { (void)data; return &fat_binary; }
void __hipUnregisterFatBinary(void **modules) { (void)modules; }
void __hipRegisterFunction(void **modules, const void *host, char *name, const char *device_name, unsigned threads, void *a, void *b, void *c, void *d, int *e) {
  (void)modules, (void)host, (void)name, (void)device_name, (void)threads, (void)a, (void)b, (void)c, (void)d, (void)e;
}

/* Memory: every pointer is valid on host and device. */

static hipError_t allocate(void **memory, size_t bytes) {
  enum { PAGE = 4096 };
  return result(posix_memalign(memory, PAGE, bytes ? bytes : 1) == 0 ? SUCCESS : OUT_OF_MEMORY);
}
hipError_t hipMalloc(void **memory, size_t bytes) { return allocate(memory, bytes); }
hipError_t hipExtMallocWithFlags(void **memory, size_t bytes, unsigned flags) { (void)flags; return allocate(memory, bytes); }
hipError_t hipHostMalloc(void **memory, size_t bytes, unsigned flags) { (void)flags; return allocate(memory, bytes); }
hipError_t hipFree(void *memory) { free(memory); return SUCCESS; }
hipError_t hipHostFree(void *memory) { free(memory); return SUCCESS; }
hipError_t hipHostRegister(void *memory, size_t bytes, unsigned flags) { (void)memory, (void)bytes, (void)flags; return SUCCESS; }
hipError_t hipHostUnregister(void *memory) { (void)memory; return SUCCESS; }
hipError_t hipHostGetDevicePointer(void **on_device, void *on_host, unsigned flags) { (void)flags; *on_device = on_host; return SUCCESS; }

hipError_t hipMemcpy(void *to, const void *from, size_t bytes, int kind) {
  (void)kind;
  memmove(to, from, bytes);
  return SUCCESS;
}
hipError_t hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, hipStream_t stream) {
  (void)kind;
  return enqueue(stream, (struct task){.kind = COPY, .memory = {.to = to, .from = from, .bytes = bytes}});
}
hipError_t hipMemsetAsync(void *to, int value, size_t bytes, hipStream_t stream) {
  return enqueue(stream, (struct task){.kind = FILL, .memory = {.to = to, .value = value, .bytes = bytes}});
}

/* Devices. */

hipError_t hipGetDeviceCount(int *count) { *count = LAB_DEVICES; return SUCCESS; }
hipError_t hipGetDevice(int *current) { *current = device; return SUCCESS; }
hipError_t hipSetDevice(int number) {
  if (number < 0 || number >= LAB_DEVICES) return result(INVALID_VALUE);
  device = number;
  return SUCCESS;
}

/* Of the properties RCCL reads gcnArch alone. These are the size of the structure and its place in HIP 5. */
hipError_t hipGetDeviceProperties(void *properties, int number) {
  enum { SIZE = 792, GCN_ARCH = 392, VEGA_20 = 906 };
  (void)number;
  memset(properties, 0, SIZE);
  *(int *)((char *)properties + GCN_ARCH) = VEGA_20;
  return SUCCESS;
}

hipError_t hipDeviceGetAttribute(int *value, int attribute, int number) {
  enum { CAPABILITY_MAJOR = 23, CAPABILITY_MINOR = 61, WARP_SIZE = 87, FLUSH_REGISTER = 10005 };
  (void)number;
  switch (attribute) {
  case CAPABILITY_MAJOR: *value = 9; return SUCCESS;
  case CAPABILITY_MINOR: *value = 0; return SUCCESS;
  case WARP_SIZE: *value = LAB_WARP; return SUCCESS;
  case FLUSH_REGISTER: memset(value, 0, sizeof(void *)); return SUCCESS; /* a pointer; there is none */
  default: return result(INVALID_VALUE);
  }
}

hipError_t hipDeviceGetPCIBusId(char *id, int length, int number) {
  snprintf(id, (size_t)length, "%04x:%02x:00.0", LAB_PCI_DOMAIN, number + 1);
  return SUCCESS;
}
hipError_t hipDeviceGetByPCIBusId(int *number, const char *id) {
  unsigned domain, bus;
  if (sscanf(id, "%x:%x", &domain, &bus) != 2 || domain != LAB_PCI_DOMAIN || bus < 1 || bus > LAB_DEVICES) return result(INVALID_VALUE);
  *number = (int)bus - 1;
  return SUCCESS;
}
hipError_t hipDeviceCanAccessPeer(int *can, int from, int to) { (void)from, (void)to; *can = 0; return SUCCESS; }

hipError_t hipGetLastError(void) {
  hipError_t error = last_error;
  last_error = SUCCESS;
  return error;
}
const char *hipGetErrorString(hipError_t error) {
  switch (error) {
  case SUCCESS: return "success";
  case INVALID_VALUE: return "invalid value";
  case OUT_OF_MEMORY: return "out of memory";
  case NOT_READY: return "not ready";
  default: return "not part of the lab";
  }
}

/* RCCL imports these, but does not call them as the lab runs it. */
#define NOT_IN_THE_LAB(name) hipError_t name(void) { return result(NOT_SUPPORTED); }
NOT_IN_THE_LAB(hipDeviceEnablePeerAccess)
NOT_IN_THE_LAB(hipIpcCloseMemHandle)
NOT_IN_THE_LAB(hipIpcGetMemHandle)
NOT_IN_THE_LAB(hipIpcOpenMemHandle)
NOT_IN_THE_LAB(hipPointerGetAttributes)
NOT_IN_THE_LAB(hipStreamAddCallback)
NOT_IN_THE_LAB(__hipPopCallConfiguration)
