/* A plugin that passes everything on to another and changes one byte in the middle of every message received. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { IRECV = 10, TEST = 12, SLOTS = 21, MOST = 64 };
typedef int (*irecv_call)(void *, int, void **, size_t *, int *, void **, void **, void **);
typedef int (*test_call)(void *, int *, int *);

struct table {
  const char *name;
  void *slots[SLOTS];
} ncclNetPlugin_v12;

static struct table real;
static struct { void *request; char *data; } receives[MOST];

static int irecv(void *comm, int n, void **data, size_t *sizes, int *tags, void **registrations, void **profiles, void **request) {
  int result = ((irecv_call)real.slots[IRECV])(comm, n, data, sizes, tags, registrations, profiles, request);
  for (int i = 0; *request != NULL && i < MOST; i++) {
    if (receives[i].request == NULL) {
      receives[i].request = *request;
      receives[i].data = data[0];
      break;
    }
  }
  return result;
}

static int test(void *request, int *done, int *size) {
  int result = ((test_call)real.slots[TEST])(request, done, size);
  for (int i = 0; *done && i < MOST; i++) {
    if (receives[i].request == request) {
      receives[i].data[*size / 2] ^= 1;
      receives[i].request = NULL;
    }
  }
  return result;
}

__attribute__((constructor)) static void load(void) {
  void *library = dlopen(getenv("REAL_PLUGIN"), RTLD_NOW);
  void *table = library == NULL ? NULL : dlsym(library, "ncclNetPlugin_v12");
  if (table == NULL) abort();
  memcpy(&real, table, sizeof real);
  ncclNetPlugin_v12 = real;
  ncclNetPlugin_v12.slots[IRECV] = (void *)irecv;
  ncclNetPlugin_v12.slots[TEST] = (void *)test;
}
