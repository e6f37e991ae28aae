/* What RCCL 2.13.4 lays out in device memory for its kernels, as far as the lab's kernels need it. */
#ifndef RCCL_H
#define RCCL_H

#include <stdint.h>

#include "arithmetic.h"

enum { STEPS = 8, TREE_CHILDREN = 3, STAR_PEERS = 7, CONNECTIONS = 3 };
enum protocol { LL = 0, LL128 = 1, SIMPLE = 2, PROTOCOLS = 3 };
enum algorithm { TREE = 0, RING = 1, COLLNET = 2, ALGORITHMS = 3 };
enum collective { BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE };

/* One end of a connection. Buffers of every protocol are rings of STEPS steps. The sender counts steps in *tail and the receiver in
 * *head; with LL there is no tail, as each word of data has a flag of its own. For connections over a network, sizes tells RCCL's
 * proxy thread the bytes of each step, and offsets, if there is one, the place of a step in a shared buffer. */
struct connection {
  char *buffers[PROTOCOLS];
  uint64_t *tail, *head;
  int direct, shared;
  void *direct_exchange[2];
  int *sizes, *offsets;
  uint64_t step; /* kept from one kernel to the next */
  uint64_t last_cleaning;
  uint32_t *flush_registers[2];
};

struct peer { struct connection send[CONNECTIONS], receive[CONNECTIONS]; };

struct ring {
  int previous, next;
  int *ranks; /* from this one on */
  int index;
};
struct tree { int depth, up, down[TREE_CHILDREN]; }; /* -1 for none */
struct star { int depth, out, heads, head, shift, up[STAR_PEERS], down[STAR_PEERS]; };

struct channel {
  struct peer *peers; /* by rank; then the network of CollNet */
  struct ring ring;
  struct tree tree, pivot;
  struct star collnet;
  uint32_t *done;
} __attribute__((aligned(16)));

struct communicator {
  int rank, ranks, buffer_bytes[PROTOCOLS], works;
  void *work;
  uint32_t *abort;
  struct channel *channels;
};

/* A work item: of one collective, or of a receive and a send, on one channel. */
struct collective_work {
  uint8_t used : 1, argument_is_pointer : 1, registered : 1, warps : 5;
  uint8_t direct, channel, channels; /* the index of this channel among those of the operation */
  uint32_t root : 28, unused : 2, connection : 2;
  const void *source;
  void *destination;
  uint64_t count, last_chunk, argument, serial;
};

enum { P2P_WORKS = 2 };
struct p2p_work {
  int32_t peer : 30;
  uint32_t connection : 2;
  uint16_t kind : 4, warps : 4, first_warp : 4, groups : 4;
  uint16_t serial;
  uint32_t memory_high, memory_low, bytes_high, bytes_low;
  int32_t chunk;
};

struct work {
  union { int32_t next; uint32_t done; }; /* the next item, or after the last one the number to report */
  uint16_t function;
  uint8_t last : 1, in_queue : 1;
  uint8_t kind;
  union {
    struct collective_work collective;
    struct p2p_work p2p[P2P_WORKS];
    char size[248];
  };
};
enum { WORK_COLLECTIVE = 1, WORK_P2P = 2 };

/* The functions of collectives are numbered by collective, operation, type, algorithm and protocol, in this order. */
enum { FUNCTION_P2P = 2710 };

_Static_assert(sizeof(struct connection) == 112 && sizeof(struct channel) == 160 && sizeof(struct work) == 256, "layout of RCCL 2.13.4");
_Static_assert(sizeof(struct collective_work) == 56 && sizeof(struct p2p_work) == 28, "layout of RCCL 2.13.4");

#endif
