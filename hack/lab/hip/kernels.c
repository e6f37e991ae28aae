/* RCCL's kernels, on host memory: rings, trees, CollNet, sends and receives, with the protocols SIMPLE and LL. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arithmetic.h"
#include "fibers.h"
#include "lab.h"
#include "rccl.h"

enum { MAX_LL_STEP = 32 << 10 }; /* bytes of data in a step of LL; its flags take as much */
enum { GRAIN = 16 };             /* slices are multiples of this number of elements */

/* How data moves: the connections, and what happens to it on the way. */
struct link { struct connection *connection; uint64_t step; };
struct mover {
  const struct communicator *communicator;
  enum protocol protocol;
  uint64_t slices, steps; /* of a chunk, and of a slice */
  enum type type;
  enum operation operation;
  uint64_t argument;
  struct link in[STAR_PEERS], out[STAR_PEERS];
  int ins, outs;
};

static int flip_next;
void lab_flip_received(void) { __atomic_store_n(&flip_next, 1, __ATOMIC_RELEASE); }

static uint64_t divide_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
static uint64_t round_up(uint64_t a, uint64_t b) { return divide_up(a, b) * b; }
static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t seen(const uint64_t *counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }
static void publish(uint64_t *counter, uint64_t value) { __atomic_store_n(counter, value, __ATOMIC_RELEASE); }

static uint64_t step_bytes(const struct mover *m) {
  uint64_t bytes = (uint64_t)m->communicator->buffer_bytes[m->protocol] / STEPS;
  return m->protocol == LL ? bytes / 2 : bytes;
}

/* Connections. A chunk of SIMPLE begins at a multiple of its steps; the receiver gives back what is skipped. */
static void add_in(struct mover *m, struct channel *channel, int peer, int which) {
  struct connection *c = &channel->peers[peer].receive[which];
  struct link *l = &m->in[m->ins++];
  *l = (struct link){c, c->step};
  if (m->protocol != SIMPLE) return;
  l->step = round_up(l->step, m->slices * m->steps);
  publish(c->head, l->step);
}
static void add_out(struct mover *m, struct channel *channel, int peer, int which) {
  struct connection *c = &channel->peers[peer].send[which];
  uint64_t step = m->protocol == SIMPLE ? round_up(c->step, m->slices * m->steps) : c->step;
  m->out[m->outs++] = (struct link){c, step};
}
static void add_all(struct mover *m, void (*add)(struct mover *, struct channel *, int, int), struct channel *channel, const int *peers, int max, int which) {
  for (int i = 0; i < max && peers[i] >= 0; i++) add(m, channel, peers[i], which);
}
static void finish(struct mover *m) {
  for (int i = 0; i < m->ins; i++) m->in[i].connection->step = m->in[i].step;
  for (int i = 0; i < m->outs; i++) m->out[i].connection->step = m->out[i].step;
}

/* One line of LL: two words, each with its flag. */
struct line { uint32_t first, first_flag, second, second_flag; };

static char *simple_slot(const struct mover *m, const struct link *l) {
  const struct connection *c = l->connection;
  uint64_t at = l->step % STEPS;
  if (c->offsets) return c->buffers[SIMPLE] + __atomic_load_n(&c->offsets[at], __ATOMIC_ACQUIRE);
  return c->buffers[SIMPLE] + at * step_bytes(m);
}
static struct line *ll_slot(const struct mover *m, const struct link *l) {
  return (struct line *)l->connection->buffers[LL] + l->step % STEPS * (step_bytes(m) / sizeof(uint64_t));
}

/* receive waits for the next slice, of known length, and returns its data. */
static const char *receive(const struct mover *m, const struct link *l, uint64_t bytes, char *unpacked) {
  char *data = unpacked;
  if (m->protocol == SIMPLE) {
    WAIT_UNTIL(seen(l->connection->tail) >= l->step + m->steps);
    data = simple_slot(m, l);
  } else {
    struct line *lines = ll_slot(m, l);
    uint32_t flag = (uint32_t)(l->step + 1);
    for (uint64_t i = 0; i < divide_up(bytes, sizeof(uint64_t)); i++) {
      if (__atomic_load_n(&lines[i].first_flag, __ATOMIC_ACQUIRE) != flag || __atomic_load_n(&lines[i].second_flag, __ATOMIC_ACQUIRE) != flag)
        WAIT_UNTIL(__atomic_load_n(&lines[i].first_flag, __ATOMIC_ACQUIRE) == flag && __atomic_load_n(&lines[i].second_flag, __ATOMIC_ACQUIRE) == flag);
      memcpy(unpacked + 8 * i, &lines[i].first, 4);
      memcpy(unpacked + 8 * i + 4, &lines[i].second, 4);
    }
  }
  if (bytes > 0 && __atomic_exchange_n(&flip_next, 0, __ATOMIC_ACQ_REL)) data[bytes - 1] ^= 0x40;
  return data;
}
static void received(const struct mover *m, struct link *l) {
  l->step += m->steps;
  publish(l->connection->head, l->step);
}

/* wait_for_room waits until the next slice can be sent, and announces its length. */
static void wait_for_room(const struct mover *m, const struct link *l, uint64_t bytes) {
  const struct connection *c = l->connection;
  WAIT_UNTIL(seen(c->head) + STEPS >= l->step + m->steps);
  int on_wire = (int)(m->protocol == LL ? divide_up(bytes, sizeof(uint64_t)) * sizeof(struct line) : bytes);
  if (c->sizes) __atomic_store_n(&c->sizes[l->step % STEPS], on_wire, __ATOMIC_RELEASE);
}
static void put(const struct mover *m, const struct link *l, const char *data, uint64_t bytes) {
  if (m->protocol == SIMPLE) {
    char *slot = simple_slot(m, l);
    if (slot != data) memcpy(slot, data, bytes);
    return;
  }
  struct line *lines = ll_slot(m, l);
  uint32_t flag = (uint32_t)(l->step + 1);
  for (uint64_t i = 0; i < divide_up(bytes, sizeof(uint64_t)); i++) {
    uint32_t words[2] = {0, 0};
    memcpy(words, data + 8 * i, smaller(sizeof words, bytes - 8 * i));
    lines[i].first = words[0], lines[i].second = words[1];
    __atomic_store_n(&lines[i].first_flag, flag, __ATOMIC_RELEASE);
    __atomic_store_n(&lines[i].second_flag, flag, __ATOMIC_RELEASE);
  }
}
static void sent(const struct mover *m, struct link *l) {
  l->step += m->steps;
  if (m->protocol == SIMPLE) publish(l->connection->tail, l->step);
}

/* move moves a chunk: it adds up the source, if there is one, and what it receives, puts the result into the destination, if there is
 * one, and sends it. WHOLE marks the end of a reduction. Empty slices are sent too, as the peers and RCCL's proxies count them. */
enum { RECEIVE = 1, SEND = 2, WHOLE = 4 };
static void move(struct mover *m, int what, const char *source, char *destination, uint64_t count) {
  char unpacked[TREE_CHILDREN][MAX_LL_STEP], result[MAX_LL_STEP];
  const char *in[STAR_PEERS];
  int ins = what & RECEIVE ? m->ins : 0, outs = what & SEND ? m->outs : 0;
  uint64_t element = type_bytes[m->type];
  uint64_t slice = m->protocol == LL ? count : round_up(divide_up(count, m->slices), GRAIN);
  for (uint64_t s = 0, at = 0; s < m->slices; s++) {
    uint64_t n = smaller(slice, count - at), bytes = n * element;
    for (int i = 0; i < ins; i++) in[i] = receive(m, &m->in[i], bytes, unpacked[i % TREE_CHILDREN]);
    for (int i = 0; i < outs; i++) wait_for_room(m, &m->out[i], bytes);
    if (n > 0) {
      const char *from = source ? source + at * element : NULL;
      char *to = destination ? destination + at * element : outs > 0 && m->protocol == SIMPLE ? simple_slot(m, &m->out[0]) : result;
      if (!from) memcpy(to, in[0], bytes);
      else if (m->operation == PRE_MUL_SUM) scale(m->type, to, from, &m->argument, n);
      else if (to != from) memcpy(to, from, bytes);
      for (int i = from ? 0 : 1; i < ins; i++) reduce(m->type, m->operation, to, in[i], n);
      if (what & WHOLE && m->operation == SUM_POST_DIV) divide(m->type, to, (int64_t)m->argument, n);
      for (int i = 0; i < outs; i++) put(m, &m->out[i], to, bytes);
    }
    for (int i = 0; i < outs; i++) sent(m, &m->out[i]);
    for (int i = 0; i < ins; i++) received(m, &m->in[i]);
    at += n;
  }
}

/* Collectives. Each is cut into loops, and a loop into one chunk for each channel, or for each of the parts of a channel. RCCL's proxy
 * threads count loops, so these have RCCL's sizes. */
struct job {
  const struct communicator *communicator;
  struct channel *channel;
  const struct collective_work *work;
  struct mover mover;    /* as each of the job's movers begins, without connections */
  uint64_t chunk, parts; /* elements of a full chunk; parts of a channel */
};

static uint64_t loop_elements(const struct job *j) { return j->chunk * j->parts * j->work->channels; }

/* A part is a chunk of one loop: its first element, and its length, which is 0 behind the end. The last loop may have shorter ones. */
struct part { uint64_t offset, count; };
static struct part part_at(const struct job *j, uint64_t loop, uint64_t part) {
  uint64_t all = j->parts * j->work->channels, rest = j->work->count - loop;
  uint64_t chunk = smaller(j->chunk, round_up(divide_up(rest, all), 128 / type_bytes[j->mover.type]));
  uint64_t offset = (j->work->channel * j->parts + part) * chunk;
  return (struct part){loop + offset, offset < rest ? smaller(chunk, rest - offset) : 0};
}
static const char *source(const struct job *j, uint64_t offset) { return (const char *)j->work->source + offset * type_bytes[j->mover.type]; }
static char *destination(const struct job *j, uint64_t offset) { return (char *)j->work->destination + offset * type_bytes[j->mover.type]; }

#define EACH_LOOP(j, loop) for (uint64_t loop = 0; loop < (j)->work->count; loop += loop_elements(j))

/* Rings: ranks[i] is the rank that is i places behind this one. */

static void ring_all_reduce(const struct job *j, struct mover *m, uint64_t loop) {
  uint64_t ranks = j->parts, last = 2 * ranks - 1;
  for (uint64_t i = 1; i <= last; i++) { /* first all sums, then all results go around */
    struct part p = part_at(j, loop, ((uint64_t)j->channel->ring.index + 2 * ranks - i) % ranks);
    int what = (i > 1 ? RECEIVE : 0) | (i < last ? SEND : 0) | (i == ranks ? WHOLE : 0);
    move(m, what, i <= ranks ? source(j, p.offset) : NULL, i >= ranks ? destination(j, p.offset) : NULL, p.count);
  }
}

static void ring_all_gather(const struct job *j, struct mover *m, uint64_t loop) {
  int ranks = j->communicator->ranks;
  struct part p = part_at(j, loop, 0);
  for (int i = 0; i < ranks; i++) {
    uint64_t from = (uint64_t)j->channel->ring.ranks[(ranks - i) % ranks];
    move(m, (i > 0 ? RECEIVE : 0) | (i < ranks - 1 ? SEND : 0), i == 0 ? source(j, p.offset) : NULL, destination(j, from * j->work->count + p.offset), p.count);
  }
}

static void ring_reduce_scatter(const struct job *j, struct mover *m, uint64_t loop) {
  int ranks = j->communicator->ranks;
  struct part p = part_at(j, loop, 0);
  for (int i = 1; i <= ranks; i++) {
    uint64_t to = (uint64_t)j->channel->ring.ranks[(ranks - i) % ranks];
    int what = (i > 1 ? RECEIVE : 0) | (i < ranks ? SEND : WHOLE);
    move(m, what, source(j, to * j->work->count + p.offset), i == ranks ? destination(j, p.offset) : NULL, p.count);
  }
}

static void ring_broadcast(const struct job *j, struct mover *m, uint64_t loop) {
  const int *ranks = j->channel->ring.ranks, root = (int)j->work->root;
  struct part p = part_at(j, loop, 0);
  int what = (ranks[0] != root ? RECEIVE : 0) | (ranks[1] != root ? SEND : 0);
  move(m, what, ranks[0] == root ? source(j, p.offset) : NULL, destination(j, p.offset), p.count);
}

static void ring_reduce(const struct job *j, struct mover *m, uint64_t loop) {
  const int *ranks = j->channel->ring.ranks, root = (int)j->work->root;
  struct part p = part_at(j, loop, 0);
  int what = (ranks[j->communicator->ranks - 1] != root ? RECEIVE : 0) | (ranks[0] != root ? SEND : WHOLE);
  move(m, what, source(j, p.offset), ranks[0] == root ? destination(j, p.offset) : NULL, p.count);
}

static void ring(const struct job *j, void (*one_loop)(const struct job *, struct mover *, uint64_t)) {
  struct mover m = j->mover;
  add_in(&m, j->channel, j->channel->ring.previous, (int)j->work->connection);
  add_out(&m, j->channel, j->channel->ring.next, (int)j->work->connection);
  EACH_LOOP(j, loop) one_loop(j, &m, loop);
  finish(&m);
}

/* An all-reduce over a tree, or over CollNet, has ways that work at the same time, each in a fiber of its own. A way moves one part of
 * each loop. */
struct way {
  const struct job *job;
  struct mover mover;
  int what, from_source, to_destination;
  uint64_t part;
  int done;
};
static void run_way(void *argument) {
  struct way *w = argument;
  const struct job *j = w->job;
  EACH_LOOP(j, loop) {
    struct part p = part_at(j, loop, w->part);
    move(&w->mover, w->what, w->from_source ? source(j, p.offset) : NULL, w->to_destination ? destination(j, p.offset) : NULL, p.count);
  }
  finish(&w->mover);
}
static void run_ways(struct way *ways, int count) {
  for (int i = 0; i < count; i++) fiber_start(run_way, &ways[i], &ways[i].done);
  for (int i = 0; i < count; i++) WAIT_UNTIL(ways[i].done);
}

/* Up the tree go sums, and down go results; the root turns them around. */
static void tree(const struct job *j) {
  const struct tree *t = &j->channel->tree;
  struct way up = {.job = j, .mover = j->mover, .what = RECEIVE | SEND, .from_source = 1}, down = {.job = j, .mover = j->mover, .what = RECEIVE | SEND, .to_destination = 1};
  add_all(&up.mover, add_in, j->channel, t->down, TREE_CHILDREN, 0);
  if (t->up < 0) {
    add_all(&up.mover, add_out, j->channel, t->down, TREE_CHILDREN, 0);
    up.what |= WHOLE, up.to_destination = 1;
    run_ways(&up, 1);
    return;
  }
  add_out(&up.mover, j->channel, t->up, 0);
  add_in(&down.mover, j->channel, t->up, 0);
  add_all(&down.mover, add_out, j->channel, t->down, TREE_CHILDREN, 0);
  run_ways((struct way[]){up, down}, 2);
}

/* CollNet: the heads of a host send the sums of the host's ranks to the network, each for its part, and pass on what the network has
 * made of them. The other connections of a pair of ranks than those of rings are used towards the network. */
static void collnet(const struct job *j) {
  const struct star *s = &j->channel->collnet;
  struct way ways[2 * STAR_PEERS + 2];
  int count = 0;
  for (int i = 0; i < STAR_PEERS && s->up[i] >= 0; i++) {
    uint64_t part = (uint64_t)(s->head >= 0 && i >= s->head ? i + 1 : i);
    struct way scatter = {.job = j, .mover = j->mover, .what = SEND, .from_source = 1, .part = part};
    struct way gather = {.job = j, .mover = j->mover, .what = RECEIVE, .to_destination = 1, .part = part};
    add_out(&scatter.mover, j->channel, s->up[i], 1);
    add_in(&gather.mover, j->channel, s->up[i], 0);
    ways[count++] = scatter, ways[count++] = gather;
  }
  if (s->out >= 0) {
    struct way sum = {.job = j, .mover = j->mover, .what = RECEIVE | SEND, .from_source = 1, .part = (uint64_t)s->head};
    struct way result = {.job = j, .mover = j->mover, .what = RECEIVE | SEND | WHOLE, .to_destination = 1, .part = (uint64_t)s->head};
    add_all(&sum.mover, add_in, j->channel, s->down, STAR_PEERS, 1);
    add_out(&sum.mover, j->channel, s->out, 1);
    add_in(&result.mover, j->channel, s->out, 0);
    add_all(&result.mover, add_out, j->channel, s->down, STAR_PEERS, 0);
    ways[count++] = sum, ways[count++] = result;
  }
  run_ways(ways, count);
}

static void unknown(unsigned function) {
  fprintf(stderr, "lab: RCCL asked for kernel function %u, which the lab does not have\n", function);
  abort();
}

static void run_collective(const struct communicator *communicator, struct channel *channel, unsigned function, const struct collective_work *work) {
  unsigned rest = function, protocol = rest % PROTOCOLS;
  unsigned algorithm = (rest /= PROTOCOLS) % ALGORITHMS, type = (rest /= ALGORITHMS) % TYPES;
  unsigned operation = (rest /= TYPES) % OPERATIONS, collective = rest / OPERATIONS;
  int in_bytes = collective == BROADCAST || collective == ALL_GATHER; /* these count bytes, whatever the type */
  int wide = algorithm == RING && protocol == SIMPLE && (collective == ALL_REDUCE || collective == ALL_GATHER || collective == REDUCE_SCATTER);
  struct job j = {.communicator = communicator, .channel = channel, .work = work, .parts = 1,
                  .mover = {.communicator = communicator, .protocol = protocol, .slices = wide ? 2 : 1, .steps = wide ? 2 : 1,
                            .type = in_bytes ? INT8 : type, .operation = in_bytes ? SUM : operation, .argument = work->argument}};
  if (work->argument_is_pointer) memcpy(&j.mover.argument, (const void *)(uintptr_t)work->argument, type_bytes[type]);
  j.chunk = step_bytes(&j.mover) * j.mover.slices * j.mover.steps / type_bytes[j.mover.type];
  if (protocol == LL128 || collective > ALL_REDUCE || (algorithm != RING && collective != ALL_REDUCE) || (protocol == LL && step_bytes(&j.mover) > MAX_LL_STEP)) unknown(function);
  if (algorithm != RING && protocol == SIMPLE) j.chunk = work->last_chunk;
  if (algorithm == COLLNET) j.parts = (uint64_t)channel->collnet.heads;
  if (algorithm == TREE) tree(&j);
  else if (algorithm == COLLNET) collnet(&j);
  else {
    if (collective == ALL_REDUCE) j.parts = (uint64_t)communicator->ranks;
    ring(&j, (void (*const[])(const struct job *, struct mover *, uint64_t)){ring_broadcast, ring_reduce, ring_all_gather, ring_reduce_scatter, ring_all_reduce}[collective]);
  }
}

/* Sends and receives. A work item has one receive and one send, which wait for different peers. */
struct exchange {
  const struct communicator *communicator;
  struct channel *channel;
  const struct p2p_work *work;
  int is_send, done;
};
static char *p2p_memory(const struct p2p_work *w) { return (char *)(uintptr_t)((uint64_t)w->memory_high << 32 | w->memory_low); }

static void run_exchange(void *argument) {
  struct exchange *e = argument;
  const struct p2p_work *w = e->work;
  struct mover m = {.communicator = e->communicator, .protocol = SIMPLE, .slices = 1, .steps = 1, .type = INT8, .operation = SUM};
  uint64_t bytes = (uint64_t)w->bytes_high << 32 | w->bytes_low, at = 0;
  char *memory = p2p_memory(w);
  (e->is_send ? add_out : add_in)(&m, e->channel, w->peer, (int)w->connection);
  do { /* a message without bytes has a chunk too */
    uint64_t n = smaller((uint64_t)w->chunk, bytes - at);
    move(&m, e->is_send ? SEND : RECEIVE, e->is_send ? memory + at : NULL, e->is_send ? NULL : memory + at, n);
    at += n;
  } while (at < bytes);
  finish(&m);
}

static void run_p2p(const struct communicator *communicator, struct channel *channel, const struct p2p_work works[P2P_WORKS]) {
  struct exchange exchanges[P2P_WORKS];
  for (int i = 0; i < P2P_WORKS; i++) {
    const struct p2p_work *w = &works[i];
    exchanges[i] = (struct exchange){communicator, channel, w, i == 1, 1};
    if (w->kind == 0 || w->peer < 0) continue;
    if (w->peer != communicator->rank) fiber_start(run_exchange, &exchanges[i], &exchanges[i].done);
    else if (i == 1) memmove(p2p_memory(&works[0]), p2p_memory(w), (uint64_t)w->bytes_high << 32 | w->bytes_low);
  }
  for (int i = 0; i < P2P_WORKS; i++) WAIT_UNTIL(exchanges[i].done);
}

/* A block serves one channel: its work items in turn. */
struct block {
  const struct communicator *communicator;
  struct channel *channel;
  const struct work *works;
  int index, done;
};
static void run_block(void *argument) {
  struct block *b = argument;
  for (int at = b->index;;) {
    struct work w = b->works[at]; /* RCCL may reuse the item once it is reported */
    if (w.last && w.in_queue) __atomic_store_n(b->channel->done, w.done, __ATOMIC_RELEASE);
    if (w.function == FUNCTION_P2P) run_p2p(b->communicator, b->channel, w.p2p);
    else if (w.kind == WORK_COLLECTIVE) run_collective(b->communicator, b->channel, w.function, &w.collective);
    else unknown(w.function);
    if (w.last) return;
    at = w.next;
  }
}

void lab_run_kernel(const void *communicator, uint64_t channels, const void *works) {
  const struct communicator *c = communicator;
  struct block blocks[64];
  int count = 0;
  for (int i = 0; i < 64; i++) {
    if (!(channels >> i & 1)) continue;
    blocks[count] = (struct block){c, &c->channels[i], works, count, 0};
    fiber_start(run_block, &blocks[count], &blocks[count].done);
    count++;
  }
  fibers_run(c->abort);
}
