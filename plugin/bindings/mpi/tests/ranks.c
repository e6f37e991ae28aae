/* One rank. The argument says what it does. C and C++, as nccl-tests are C++. */
#include <mpi.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_RANKS = 8, COUNT = 70001 };

static int me = -1, ranks;

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      fprintf(stderr, "rank %d, line %d: not %s\n", me, __LINE__, #condition);  \
      exit(2);                                                                  \
    }                                                                           \
  } while (0)
#define OK(call) CHECK((call) == MPI_SUCCESS)

/* Every type and operation, in place and not. */
static void allreduces(void) {
  long long sums[2] = {me, 1LL << 40}, total[2] = {-1, -1};
  OK(MPI_Allreduce(sums, total, 2, MPI_LONG_LONG, MPI_SUM, MPI_COMM_WORLD));
  CHECK(total[0] == ranks * (ranks - 1) / 2 && total[1] == ranks * (1LL << 40));
  CHECK(sums[0] == me && sums[1] == 1LL << 40);

  int least = 100 - me;
  OK(MPI_Allreduce(MPI_IN_PLACE, &least, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD));
  CHECK(least == 100 - (ranks - 1));
  long most = -(1L << 40) - me;
  OK(MPI_Allreduce(MPI_IN_PLACE, &most, 1, MPI_LONG, MPI_MAX, MPI_COMM_WORLD));
  CHECK(most == -(1L << 40));
  int64_t wide = (int64_t)me << 33;
  OK(MPI_Allreduce(MPI_IN_PLACE, &wide, 1, MPI_INT64_T, MPI_MAX, MPI_COMM_WORLD));
  CHECK(wide == (int64_t)(ranks - 1) << 33);
  double half = me + 0.5;
  OK(MPI_Allreduce(MPI_IN_PLACE, &half, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD));
  CHECK(half == ranks * (ranks - 1) / 2 + 0.5 * ranks);

  static double many[COUNT];
  for (int i = 0; i < COUNT; i++) many[i] = (me + 1) * (i % 97);
  OK(MPI_Allreduce(MPI_IN_PLACE, many, COUNT, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD));
  for (int i = 0; i < COUNT; i++) CHECK(many[i] == ranks * (ranks + 1) / 2 * (i % 97));
  OK(MPI_Allreduce(NULL, NULL, 0, MPI_INT, MPI_SUM, MPI_COMM_WORLD));
}

static void gathers(void) {
  uint64_t all[MAX_RANKS] = {0}, own = 7000u + (unsigned)me;
  all[me] = own;
  OK(MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, all, sizeof *all, MPI_BYTE, MPI_COMM_WORLD));
  for (int r = 0; r < ranks; r++) CHECK(all[r] == 7000u + (unsigned)r);
  memset(all, 0, sizeof all);
  OK(MPI_Allgather(&own, sizeof own, MPI_BYTE, all, 1, MPI_INT64_T, MPI_COMM_WORLD));
  for (int r = 0; r < ranks; r++) CHECK(all[r] == 7000u + (unsigned)r);

  /* Only the root has a place for the lines. */
  for (int root = 0; root < ranks; root++) {
    char line[33], lines[MAX_RANKS * sizeof line], expected[sizeof line];
    snprintf(line, sizeof line, "line of rank %d", me);
    OK(MPI_Gather(line, sizeof line, MPI_BYTE, me == root ? lines : NULL, sizeof line, MPI_BYTE, root, MPI_COMM_WORLD));
    for (int r = 0; me == root && r < ranks; r++) {
      snprintf(expected, sizeof expected, "line of rank %d", r);
      CHECK(strcmp(lines + (size_t)r * sizeof line, expected) == 0);
    }
    double times[2 * MAX_RANKS] = {0}, two[2] = {me + 0.25, me + 0.75};
    if (me == root) memcpy(times + 2 * me, two, sizeof two);
    OK(MPI_Gather(me == root ? MPI_IN_PLACE : two, 2, MPI_DOUBLE, times, 2, MPI_DOUBLE, root, MPI_COMM_WORLD));
    for (int r = 0; me == root && r < ranks; r++) CHECK(times[2 * r] == r + 0.25 && times[2 * r + 1] == r + 0.75);
  }
}

static void broadcasts(void) {
  for (int root = 0; root < ranks; root++) {
    unsigned char id[128];
    memset(id, me, sizeof id);
    OK(MPI_Bcast(id, sizeof id, MPI_BYTE, root, MPI_COMM_WORLD));
    for (size_t i = 0; i < sizeof id; i++) CHECK(id[i] == root);
  }
}

/* Odd and even ranks, in the reverse order; then all of them but rank 0. */
static void splits(void) {
  int rank = -1, size = -1, sum = 1;
  MPI_Comm half, rest, again;
  OK(MPI_Comm_split(MPI_COMM_WORLD, me % 2, -me, &half));
  OK(MPI_Comm_rank(half, &rank));
  OK(MPI_Comm_size(half, &size));
  CHECK(half != MPI_COMM_WORLD && half != MPI_COMM_NULL);
  CHECK(size == (ranks + 1 - me % 2) / 2 && rank == size - 1 - me / 2);
  OK(MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_INT, MPI_SUM, half));
  CHECK(sum == size);
  int from = me;
  OK(MPI_Bcast(&from, 1, MPI_INT, 0, half));
  CHECK(from == (size - 1) * 2 + me % 2);

  OK(MPI_Comm_split(MPI_COMM_WORLD, me == 0 ? MPI_UNDEFINED : 3, 0, &rest));
  CHECK((rest == MPI_COMM_NULL) == (me == 0));
  if (me > 0) {
    OK(MPI_Comm_rank(rest, &rank));
    CHECK(rank == me - 1);
    OK(MPI_Barrier(rest));
    OK(MPI_Comm_free(&rest));
    CHECK(rest == MPI_COMM_NULL);
  }
  /* All ranks, in their order: what nccl-tests ask for by default. */
  OK(MPI_Comm_split(MPI_COMM_WORLD, 0, me, &again));
  OK(MPI_Comm_rank(again, &rank));
  OK(MPI_Comm_size(again, &size));
  CHECK(rank == me && size == ranks && again != half);
  OK(MPI_Barrier(again));
  OK(MPI_Comm_free(&again));
  OK(MPI_Comm_free(&half));
}

#ifdef __cplusplus
/* nccl-tests choose types and operations so. */
static void chosen_at_run_time(int which) {
  MPI_Datatype type = which == 0 ? MPI_LONG_LONG : which == 1 ? MPI_DOUBLE : MPI_Datatype();
  MPI_Op op = which == 0 ? MPI_MIN : which == 1 ? MPI_MAX : MPI_Op();
  long long value = me;
  OK(MPI_Allreduce(MPI_IN_PLACE, static_cast<void *>(&value), 1, type, op, MPI_COMM_WORLD));
  CHECK(value == 0);
}
#endif

static void everything(void) {
  allreduces();
  gathers();
  broadcasts();
  splits();
  OK(MPI_Barrier(MPI_COMM_WORLD));
#ifdef __cplusplus
  chosen_at_run_time(0);
#endif
  printf("rank %d of %d: all as expected\n", me, ranks);
}

/* The last rank ends in the middle of the others' operations. */
static void lost(int killed) {
  printf("a line that was not flushed\n");
  for (int round = 0;; round++) {
    if (round == 3 && me == ranks - 1) {
      if (killed) raise(SIGKILL);
      exit(0);
    }
    OK(MPI_Barrier(MPI_COMM_WORLD));
  }
}

/* Rank 0 asks for a sum of bytes. */
static void wrong(void) {
  char byte = 1;
  int sum = 1;
  OK(MPI_Barrier(MPI_COMM_WORLD));
  if (me == 0) MPI_Allreduce(MPI_IN_PLACE, &byte, 1, MPI_BYTE, MPI_SUM, MPI_COMM_WORLD);
  else MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
}

int main(int argc, char **argv) {
  if (argc != 2) return 3;
  const char *what = argv[1];
  /* A test that hangs ends nevertheless. */
  alarm(100);
  if (strcmp(what, "too early") == 0) MPI_Comm_rank(MPI_COMM_WORLD, &me);
  OK(MPI_Init(&argc, &argv));
  OK(MPI_Comm_rank(MPI_COMM_WORLD, &me));
  OK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
  CHECK(me >= 0 && me < ranks && ranks <= MAX_RANKS);
  if (strcmp(what, "everything") == 0) everything();
  if (strcmp(what, "killed") == 0) lost(1);
  if (strcmp(what, "exits") == 0) lost(0);
  if (strcmp(what, "wrong") == 0) wrong();
  OK(MPI_Finalize());
  if (strcmp(what, "too late") == 0) MPI_Barrier(MPI_COMM_WORLD);
  return 0;
}
