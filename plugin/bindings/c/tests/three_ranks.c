/* Calls every function of the header on three ranks, each a process, and checks results and errors. The arguments are a folder for
 * the store, and the transport. */
#include <evenkeel.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS = 3, COUNT = 100003 };

#define CHECK(condition)                                                                                        \
  do {                                                                                                          \
    if (!(condition)) {                                                                                         \
      fprintf(stderr, "rank %zu, line %d: not %s; %s\n", me, __LINE__, #condition, evenkeel_last_error());      \
      exit(1);                                                                                                  \
    }                                                                                                           \
  } while (0)
#define OK(call) CHECK((call) == EVENKEEL_OK)

static size_t me;

static void maximum(void *into, const void *other, size_t count, void *context) {
  int64_t a, b;
  for (size_t i = 0; i < count; i++) {
    memcpy(&a, (char *)into + 8 * i, 8);
    memcpy(&b, (const char *)other + 8 * i, 8);
    if (b > a) memcpy((char *)into + 8 * i, &b, 8);
  }
  *(int *)context = 1;
}

static void reductions(evenkeel_group *group) {
  static float data[COUNT];
  const char *algorithms[] = {NULL, "ring", "ring_chunked", "halving_doubling", "recursive_doubling", "bcube", "direct"};
  for (size_t a = 0; a < sizeof algorithms / sizeof *algorithms; a++) {
    evenkeel_call call = {.tag = (uint32_t)a, .timeout = 20, .algorithm = algorithms[a]};
    for (size_t i = 0; i < COUNT; i++) data[i] = (float)(me * 1000 + i % 100);
    OK(evenkeel_allreduce(group, data, COUNT, EVENKEEL_FLOAT32, EVENKEEL_SUM, &call));
    for (size_t i = 0; i < COUNT; i++) CHECK(data[i] == (float)(3000 + 3 * (i % 100)));
  }
  /* 1 + 2 + 4 in bfloat16. */
  uint16_t half[] = {(uint16_t[]){0x3f80, 0x4000, 0x4080}[me]};
  OK(evenkeel_allreduce(group, half, 1, EVENKEEL_BFLOAT16, EVENKEEL_SUM, NULL));
  CHECK(half[0] == 0x40e0);

  int64_t numbers[] = {(int64_t)me, 5, -(int64_t)me};
  int called = 0;
  OK(evenkeel_allreduce_custom(group, numbers, 3, sizeof *numbers, maximum, &called, NULL));
  CHECK(numbers[0] == 2 && numbers[1] == 5 && numbers[2] == 0 && (called || me != 0));

  double product[] = {(double)me + 2};
  OK(evenkeel_reduce(group, product, 1, EVENKEEL_FLOAT64, EVENKEEL_PROD, 1, NULL));
  CHECK(me != 1 || product[0] == 24);

  int32_t parts[6];
  for (int i = 0; i < 6; i++) parts[i] = (int32_t)me + i;
  OK(evenkeel_reduce_scatter(group, parts, 6, NULL, EVENKEEL_INT32, EVENKEEL_SUM, NULL));
  CHECK(parts[2 * me] == 3 + 6 * (int32_t)me && parts[2 * me + 1] == 6 + 6 * (int32_t)me);
  size_t counts[] = {1, 0, 2};
  int32_t uneven[] = {1, 2, 3};
  OK(evenkeel_reduce_scatter(group, uneven, 3, counts, EVENKEEL_INT32, EVENKEEL_MAX, NULL));
  CHECK(me != 2 || (uneven[1] == 2 && uneven[2] == 3));
}

static void data_movement(evenkeel_group *group) {
  char text[8] = "";
  if (me == 2) strcpy(text, "evenly");
  OK(evenkeel_broadcast(group, text, sizeof text, 2, NULL));
  CHECK(strcmp(text, "evenly") == 0);

  char all[] = "...", own = (char)('a' + me), given = 0;
  all[me] = own;
  OK(evenkeel_allgather(group, all, 3, NULL, NULL));
  CHECK(strcmp(all, "abc") == 0);
  size_t lengths[] = {0, 1, 2};
  char uneven[] = "...";
  if (me == 1) uneven[0] = 'x';
  if (me == 2) memcpy(uneven + 1, "yz", 2);
  OK(evenkeel_allgather(group, uneven, 3, lengths, NULL));
  CHECK(strcmp(uneven, "xyz") == 0);

  char gathered[4] = "";
  OK(evenkeel_gather(group, &own, 1, me == 0 ? gathered : NULL, me == 0 ? 3 : 0, NULL, 0, NULL));
  CHECK(me != 0 || strcmp(gathered, "abc") == 0);
  OK(evenkeel_gather(group, "zz", lengths[me], me == 0 ? gathered : NULL, me == 0 ? 3 : 0, lengths, 0, NULL));
  CHECK(me != 0 || strcmp(gathered, "zzz") == 0);
  OK(evenkeel_scatter(group, me == 1 ? "ijk" : NULL, me == 1 ? 3 : 0, &given, 1, NULL, 1, NULL));
  CHECK(given == "ijk"[me]);
  char portion[2] = "..";
  OK(evenkeel_scatter(group, me == 1 ? "lmn" : NULL, me == 1 ? 3 : 0, portion, lengths[me], lengths, 1, NULL));
  CHECK(memcmp(portion, me == 2 ? "mn" : me == 1 ? "l." : "..", 2) == 0);

  char out[] = {(char)(me * 3), (char)(me * 3 + 1), (char)(me * 3 + 2)}, in[3];
  OK(evenkeel_alltoall(group, out, 3, NULL, in, 3, NULL, NULL));
  CHECK(in[0] == (char)me && in[1] == (char)(me + 3) && in[2] == (char)(me + 6));
  /* All send nothing to rank 0, one byte to rank 1 and two to rank 2. */
  size_t received[] = {me, me, me};
  char letters[6];
  OK(evenkeel_alltoall(group, out, 3, lengths, letters, 3 * me, received, NULL));
  CHECK(me != 2 || memcmp(letters, "\1\2\4\5\7\10", 6) == 0);

  evenkeel_call tagged = {.tag = 7};
  size_t from = 9, bytes = 9;
  char room[4] = "";
  if (me == 0) {
    OK(evenkeel_recv(group, room, sizeof room, 2, &bytes, &tagged));
    CHECK(bytes == 2 && memcmp(room, "hi", 2) == 0);
    OK(evenkeel_recv_any(group, room, sizeof room, &from, &bytes, NULL));
    CHECK(from == 1 && bytes == 0);
  } else if (me == 1) {
    OK(evenkeel_send(group, NULL, 0, 0, NULL));
  } else {
    OK(evenkeel_send(group, "hi", 2, 0, &tagged));
  }
  OK(evenkeel_barrier(group, NULL));
}

/* Started operations of a tag run in order; a blocking call has its turn after them. */
static void requests(evenkeel_group *group) {
  enum { STARTED = 5 };
  static int64_t values[STARTED][COUNT];
  evenkeel_request *started[STARTED] = {NULL};
  for (int i = 0; i < STARTED; i++) {
    for (size_t at = 0; at < COUNT; at++) values[i][at] = (int64_t)me + i;
    evenkeel_call call = {.tag = 3, .request = &started[i]};
    OK(evenkeel_allreduce(group, values[i], COUNT, EVENKEEL_INT64, EVENKEEL_SUM, &call));
    CHECK(started[i] != NULL);
  }
  OK(evenkeel_barrier(group, &(evenkeel_call){.tag = 3}));
  for (int i = 0; i < STARTED; i++) {
    CHECK(evenkeel_request_is_done(started[i]));
    OK(evenkeel_request_wait(started[i], 0));
    for (size_t at = 0; at < COUNT; at++) CHECK(values[i][at] == 3 + 3 * i);
    evenkeel_request_free(started[i]);
  }

  evenkeel_request *receive = NULL, *any = NULL, *wrong = NULL;
  evenkeel_call call = {.request = &receive}, call_any = {.tag = 1, .request = &any}, call_wrong = {.request = &wrong};
  char text[4] = "", other[4] = "";
  size_t bytes = 9, from = 9;
  if (me == 0) {
    OK(evenkeel_recv(group, text, sizeof text, 1, &bytes, &call));
    OK(evenkeel_recv_any(group, other, sizeof other, &from, NULL, &call_any));
    CHECK(evenkeel_request_wait(receive, 0.01) == EVENKEEL_TIMEOUT && !evenkeel_request_is_done(receive));
    OK(evenkeel_send(group, "go", 2, 1, NULL));
    OK(evenkeel_request_wait(receive, 20));
    CHECK(bytes == 2 && memcmp(text, "me", 2) == 0);
    /* Freeing waits. */
    OK(evenkeel_send(group, "go", 2, 2, NULL));
    evenkeel_request_free(any);
    CHECK(from == 2 && memcmp(other, "you", 3) == 0);
  } else {
    OK(evenkeel_recv(group, text, sizeof text, 0, NULL, &call));
    OK(evenkeel_request_wait(receive, 0));
    evenkeel_call tagged = {.tag = me == 1 ? 0 : 1};
    OK(evenkeel_send(group, me == 1 ? "me" : "you", me + 1, 0, &tagged));
  }
  evenkeel_request_free(receive);

  CHECK(evenkeel_allreduce(group, NULL, 1, EVENKEEL_FLOAT32, EVENKEEL_SUM, &call_wrong) == EVENKEEL_ARGUMENT);
  CHECK(evenkeel_group_split(group, 1, &call_wrong, NULL) == EVENKEEL_ARGUMENT && wrong == NULL);
  OK(evenkeel_broadcast(group, text, 1, 9, &call_wrong));
  CHECK(evenkeel_request_wait(wrong, 0) == EVENKEEL_ARGUMENT && strstr(evenkeel_last_error(), "rank 9") != NULL);
  CHECK(evenkeel_request_wait(wrong, -1) == EVENKEEL_ARGUMENT && evenkeel_request_wait(NULL, 0) == EVENKEEL_ARGUMENT);
  evenkeel_request_free(wrong);
  evenkeel_request_free(NULL);
  CHECK(evenkeel_request_is_done(NULL));
}

/* Ranks 0 and 1 own shares, and rank 2 owns nothing. The sum is the same. */
static void link_rates(evenkeel_group *group) {
  static float data[COUNT];
  evenkeel_call direct = {.algorithm = "direct"};
  OK(evenkeel_group_set_link_rate(group, me == 2 ? 1 : 100 + me, NULL));
  for (size_t i = 0; i < COUNT; i++) data[i] = (float)(me * 1000 + i % 100);
  OK(evenkeel_allreduce(group, data, COUNT, EVENKEEL_FLOAT32, EVENKEEL_SUM, &direct));
  for (size_t i = 0; i < COUNT; i++) CHECK(data[i] == (float)(3000 + 3 * (i % 100)));
  OK(evenkeel_group_set_link_rate(group, 0, NULL));
  evenkeel_request *wrong = NULL;
  evenkeel_call with_request = {.request = &wrong};
  CHECK(evenkeel_group_set_link_rate(group, 1, &with_request) == EVENKEEL_ARGUMENT && wrong == NULL);
}

static void sub_groups(evenkeel_group *group) {
  evenkeel_group *sub = NULL;
  size_t members[] = {2, 0};
  OK(evenkeel_group_sub(group, members, 2, &sub));
  CHECK((sub == NULL) == (me == 1));
  if (sub != NULL) {
    uint8_t one[] = {1};
    CHECK(evenkeel_group_rank(sub) == (me == 2 ? 0 : 1) && evenkeel_group_size(sub) == 2);
    OK(evenkeel_allreduce(sub, one, 1, EVENKEEL_UINT8, EVENKEEL_SUM, NULL));
    CHECK(one[0] == 2);
    evenkeel_group_free(sub);
  }
  OK(evenkeel_group_split(group, me == 0 ? -1 : 4, NULL, &sub));
  CHECK((sub == NULL) == (me == 0) && (me == 0 || evenkeel_group_rank(sub) == me - 1));
  evenkeel_group_free(sub);
}

/* What the file has, as far as `text` has room. */
static void read_file(const char *path, char *text, size_t size) {
  FILE *file = fopen(path, "r");
  CHECK(file != NULL);
  text[fread(text, 1, size - 1, file)] = 0;
  fclose(file);
}

static void flight_recorder(evenkeel_group *group, const char *folder) {
  static char text[1 << 22];
  char path[4096];
  size_t ranks[] = {10, 11, 12};
  OK(evenkeel_group_set_name(group, "training", ranks, RANKS));
  CHECK(evenkeel_group_set_name(group, "training", ranks, 2) == EVENKEEL_ARGUMENT);
  snprintf(path, sizeof path, "%s/recorder-%zu.json", folder, me);
  OK(evenkeel_flight_recorder_dump(path));
  read_file(path, text, sizeof text);
  CHECK(strstr(text, "\"name\":\"training\"") != NULL && strstr(text, "\"ranks\":[10,11,12]") != NULL);
  CHECK(strstr(text, "\"name\":\"alltoall\"") != NULL && strstr(text, "\"state\":\"completed\"") != NULL);
  CHECK(evenkeel_flight_recorder_dump("/no/such/folder") == EVENKEEL_SYSTEM);
  CHECK(strstr(evenkeel_last_error(), "/no/such/folder") != NULL);
  CHECK(evenkeel_flight_recorder_dump(NULL) == EVENKEEL_ARGUMENT);
}

static void invalid_arguments(evenkeel_group *group) {
  size_t twice[] = {0, 0};
  float data[] = {1};
  evenkeel_group *sub = NULL;
  evenkeel_call odd = {.algorithm = "guess"}, never = {.timeout = -1};
  CHECK(evenkeel_allreduce(NULL, data, 1, EVENKEEL_FLOAT32, EVENKEEL_SUM, NULL) == EVENKEEL_ARGUMENT);
  CHECK(strstr(evenkeel_last_error(), "group is NULL") != NULL);
  CHECK(evenkeel_allreduce(group, NULL, 1, EVENKEEL_FLOAT32, EVENKEEL_SUM, NULL) == EVENKEEL_ARGUMENT);
  CHECK(evenkeel_allreduce(group, data, SIZE_MAX, EVENKEEL_FLOAT32, EVENKEEL_SUM, NULL) == EVENKEEL_ARGUMENT);
  CHECK(evenkeel_allreduce(group, data, 1, 99, EVENKEEL_SUM, NULL) == EVENKEEL_ARGUMENT);
  CHECK(strstr(evenkeel_last_error(), "99") != NULL);
  CHECK(evenkeel_allreduce(group, data, 1, EVENKEEL_FLOAT32, -1, NULL) == EVENKEEL_ARGUMENT);
  CHECK(evenkeel_allreduce(group, data, 1, EVENKEEL_FLOAT32, EVENKEEL_SUM, &odd) == EVENKEEL_ARGUMENT);
  CHECK(strstr(evenkeel_last_error(), "ring_chunked") != NULL);
  CHECK(evenkeel_barrier(group, &never) == EVENKEEL_ARGUMENT);
  CHECK(evenkeel_allreduce_custom(group, data, 1, 4, NULL, NULL, NULL) == EVENKEEL_ARGUMENT);
  CHECK(evenkeel_allreduce_custom(group, data, 1, 0, maximum, NULL, NULL) == EVENKEEL_ARGUMENT);
  CHECK(evenkeel_allgather(group, data, 4, NULL, NULL) == EVENKEEL_ARGUMENT);
  CHECK(evenkeel_broadcast(group, data, 4, 3, NULL) == EVENKEEL_ARGUMENT);
  CHECK(evenkeel_group_sub(group, twice, 2, &sub) == EVENKEEL_ARGUMENT && sub == NULL);
  CHECK(evenkeel_last_error_group_usable());
  OK(evenkeel_group_failure(group));
  CHECK(data[0] == 1 && evenkeel_group_rank(NULL) == SIZE_MAX && evenkeel_group_size(NULL) == 0);
  evenkeel_group_free(NULL);
  evenkeel_store_free(NULL);
}

/* Rank 2 exits; the other ranks name it. */
static void lost_rank(evenkeel_group *group) {
  if (me == 2) _exit(0);
  float data[] = {1};
  size_t named[4];
  CHECK(evenkeel_allreduce(group, data, 1, EVENKEEL_FLOAT32, EVENKEEL_SUM, NULL) == EVENKEEL_LOST);
  CHECK(evenkeel_last_error_ranks(named, 4) == 1 && named[0] == 2 && !evenkeel_last_error_group_usable());
  CHECK(evenkeel_group_failure(group) == EVENKEEL_LOST && evenkeel_barrier(group, NULL) == EVENKEEL_LOST);
}

static void aborts(evenkeel_group *group) {
  char data[1];
  if (me == 1) {
    /* When these have arrived, all ranks have joined. */
    OK(evenkeel_recv(group, data, 1, 0, NULL, NULL));
    OK(evenkeel_recv(group, data, 1, 2, NULL, NULL));
    OK(evenkeel_group_abort(group, "the disk is full"));
  } else {
    evenkeel_status status = evenkeel_send(group, "x", 1, 1, NULL);
    if (status == EVENKEEL_OK) status = evenkeel_recv(group, data, 1, 1, NULL, NULL);
    CHECK(status == EVENKEEL_ABORTED);
  }
  CHECK(evenkeel_group_failure(group) == EVENKEEL_ABORTED);
  CHECK(strstr(evenkeel_last_error(), "the disk is full") != NULL);
}

/* Rank 1 leaves, and comes back as a newcomer: the last rank of the next group. */
static void reconfigures(evenkeel_group *group, evenkeel_store *store, const char *transport) {
  evenkeel_group *next = NULL;
  size_t previous[4], named[4];
  uint8_t one[] = {1};
  OK(evenkeel_barrier(group, NULL));
  CHECK(evenkeel_group_previous_ranks(group, previous, 4) == 0);
  if (me == 1) {
    evenkeel_group_free(group);
    group = NULL;
    OK(evenkeel_group_join_as_newcomer(store, transport, 20, &next));
  } else {
    evenkeel_status status = EVENKEEL_OK;
    while (status == EVENKEEL_OK) status = evenkeel_barrier(group, NULL);
    CHECK(status == EVENKEEL_LOST && evenkeel_last_error_ranks(named, 4) == 1 && named[0] == 1);
    CHECK(evenkeel_group_reconfigure(group, NULL, 0, 0, &next) == EVENKEEL_ARGUMENT);
    CHECK(evenkeel_group_reconfigure(group, store, 0, -1, &next) == EVENKEEL_ARGUMENT);
    CHECK(evenkeel_group_reconfigure(group, store, 0, 0, NULL) == EVENKEEL_ARGUMENT);
    /* It decides for both, and can be called again. */
    if (me == 0) CHECK(evenkeel_group_reconfigure(group, store, 9, 0.05, &next) == EVENKEEL_TIMEOUT && next == NULL);
    OK(evenkeel_group_reconfigure(group, store, RANKS, 0, &next));
  }
  CHECK(evenkeel_group_size(next) == RANKS && evenkeel_group_rank(next) == (me == 0 ? 0 : 3 - me));
  CHECK(evenkeel_group_previous_ranks(next, previous, 4) == RANKS && previous[2] == SIZE_MAX);
  CHECK(previous[0] == (me == 1 ? SIZE_MAX : 0) && previous[1] == (me == 1 ? SIZE_MAX : 2));
  OK(evenkeel_allreduce(next, one, 1, EVENKEEL_UINT8, EVENKEEL_SUM, NULL));
  CHECK(one[0] == RANKS && (group == NULL || evenkeel_barrier(group, NULL) == EVENKEEL_ABORTED));
  evenkeel_group_free(group);
  evenkeel_group_free(next);
}

/* Joins a group. Its store is returned too, unless `kept` is NULL. */
static evenkeel_group *join(const char *folder, const char *prefix, const char *transport, evenkeel_store **kept) {
  char address[4096];
  evenkeel_store *store = NULL, *part = NULL;
  evenkeel_group *group = NULL;
  snprintf(address, sizeof address, "file:%s", folder);
  OK(evenkeel_store_open(address, 20, &store));
  OK(evenkeel_store_prefix(store, prefix, &part));
  evenkeel_store_free(store);
  OK(evenkeel_group_join(part, me, RANKS, transport, 20, &group));
  if (kept != NULL) *kept = part;
  else evenkeel_store_free(part);
  CHECK(evenkeel_group_rank(group) == me && evenkeel_group_size(group) == RANKS);
  return group;
}

static int rank(const char *folder, const char *transport) {
  evenkeel_store *store = NULL, *memory = NULL;
  evenkeel_group *group = NULL;
  CHECK(strlen(evenkeel_version()) >= 5 && strlen(evenkeel_last_error()) == 0);
  CHECK(evenkeel_store_open("http://x", 1, &store) == EVENKEEL_ARGUMENT && store == NULL);
  CHECK(evenkeel_store_open("file:x", 1, NULL) == EVENKEEL_ARGUMENT);
  OK(evenkeel_store_memory(&memory));
  CHECK(evenkeel_group_join(memory, 0, 1, "pigeon", 1, &group) == EVENKEEL_ARGUMENT);
  /* No other rank joins. */
  CHECK(evenkeel_group_join(memory, 0, 2, "shm", 0.2, &group) == EVENKEEL_TIMEOUT && group == NULL);
  size_t missing = 9;
  CHECK(evenkeel_last_error_ranks(&missing, 1) == 1 && missing == 1);
  evenkeel_store_free(memory);

  group = join(folder, "operations", transport, NULL);
  reductions(group);
  data_movement(group);
  requests(group);
  link_rates(group);
  sub_groups(group);
  flight_recorder(group, folder);
  invalid_arguments(group);
  OK(evenkeel_barrier(group, NULL));
  evenkeel_group_free(group);
  group = join(folder, "reconfigures", transport, &store);
  reconfigures(group, store, transport);
  evenkeel_store_free(store);
  group = join(folder, "aborts", transport, NULL);
  aborts(group);
  evenkeel_group_free(group);
  group = join(folder, "lost_rank", transport, NULL);
  lost_rank(group);
  evenkeel_group_free(group);
  return 0;
}

int main(int argc, char **argv) {
  pid_t children[RANKS];
  if (argc != 3) return 2;
  alarm(60);
  for (me = 0; me < RANKS; me++) {
    children[me] = fork();
    if (children[me] == 0) {
      alarm(60);
      return rank(argv[1], argv[2]);
    }
  }
  int failed = 0, status = 0;
  for (int i = 0; i < RANKS; i++) failed |= waitpid(children[i], &status, 0) < 0 || status != 0;
  if (!failed) puts("3 ranks: all as expected");
  return failed;
}
