/* A rank that hangs in an all-reduce until the input of rank 1 ends. The arguments are a folder for the store, and the rank. */
#include <evenkeel.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv) {
  evenkeel_store *store = NULL;
  evenkeel_group *group = NULL;
  char address[4096];
  double data[] = {1, 2, 3};
  if (argc != 3) return 2;
  alarm(60);
  snprintf(address, sizeof address, "file:%s", argv[1]);
  size_t rank = (size_t)atoi(argv[2]);
  if (evenkeel_store_open(address, 20, &store) || evenkeel_group_join(store, rank, 2, "tcp:lo", 60, &group)) {
    fprintf(stderr, "%s\n", evenkeel_last_error());
    return 1;
  }
  if (rank == 1) {
    while (getchar() != EOF) continue;
  }
  if (evenkeel_allreduce(group, data, 3, EVENKEEL_FLOAT64, EVENKEEL_SUM, NULL)) {
    fprintf(stderr, "%s\n", evenkeel_last_error());
    return 1;
  }
  evenkeel_group_free(group);
  evenkeel_store_free(store);
  return data[2] == 6 ? 0 : 1;
}
