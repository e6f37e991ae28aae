/* An all-reduce between processes, started by a launcher:
 *
 *   cc allreduce.c -levenkeel -o allreduce
 *   evenkeel-run -n 4 ./allreduce
 *   mpirun -np 4 -x EVENKEEL_STORE=tcp://10.0.0.1:29500 ./allreduce      (or file:/a/shared/folder)
 */
#include <evenkeel.h>
#include <stdio.h>
#include <stdlib.h>

/* The evenkeel_last_error_ functions return the ranks that caused the error, and whether the group still works. */
static void check(evenkeel_status status) {
  if (status != EVENKEEL_OK) {
    fprintf(stderr, "allreduce: %s\n", evenkeel_last_error());
    exit(1);
  }
}

int main(void) {
  enum { COUNT = 1 << 20 };
  static float gradients[COUNT];
  evenkeel_group *group;
  check(evenkeel_group_join_launched("allreduce", "tcp", 30.0, &group));
  size_t rank = evenkeel_group_rank(group);
  for (size_t i = 0; i < COUNT; i++) gradients[i] = (float)rank;
  check(evenkeel_allreduce(group, gradients, COUNT, EVENKEEL_FLOAT32, EVENKEEL_SUM, NULL));
  printf("rank %zu of %zu: %g\n", rank, evenkeel_group_size(group), gradients[COUNT - 1]);
  evenkeel_group_free(group);
  return 0;
}
