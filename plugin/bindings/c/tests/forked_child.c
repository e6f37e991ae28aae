/* A forked child of a process that has opened stores: those with a connection or memory of the parent refuse it. */

#include <evenkeel.h>

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Joins a group of one rank. Returns whether that has the status, and the text in its error. */
static int joins(const char *what, const evenkeel_store *store, evenkeel_status wanted, const char *text) {
  evenkeel_group *group = NULL;
  evenkeel_status status = evenkeel_group_join(store, 0, 1, "shm", 20, &group);
  const char *error = status == EVENKEEL_OK ? "" : evenkeel_last_error();
  int is_right = status == wanted && strstr(error, text) != NULL;
  if (!is_right) printf("%s: status %d: %s\n", what, (int)status, error);
  evenkeel_group_free(group);
  return is_right;
}

int main(int argc, char **argv) {
  evenkeel_store *tcp = NULL, *part = NULL, *memory = NULL, *files = NULL;
  if (argc != 3) return 2;
  alarm(60);
  if (evenkeel_store_open(argv[1], 20, &tcp) || evenkeel_store_prefix(tcp, "part", &part) || evenkeel_store_memory(&memory) ||
      evenkeel_store_open(argv[2], 20, &files)) {
    puts(evenkeel_last_error());
    return 1;
  }
  pid_t child = fork();
  if (child == 0) {
    alarm(60);
    const char *text = "this process was forked from the one that opened the store";
    int is_right = joins("tcp", tcp, EVENKEEL_STORE, text) & joins("prefix", part, EVENKEEL_STORE, text) &
                   joins("memory", memory, EVENKEEL_STORE, text) & joins("files", files, EVENKEEL_OK, "");
    evenkeel_store_free(tcp);
    evenkeel_store_free(part);
    evenkeel_store_free(memory);
    evenkeel_store_free(files);
    fflush(stdout);
    _exit(!is_right);
  }
  int status = -1;
  if (waitpid(child, &status, 0) != child || status != 0) return 1;
  if (!joins("the parent's tcp", tcp, EVENKEEL_OK, "") || !joins("the parent's memory", memory, EVENKEEL_OK, "")) return 1;
  evenkeel_store_free(part);
  evenkeel_store_free(tcp);
  evenkeel_store_free(memory);
  evenkeel_store_free(files);
  puts("as expected");
  return 0;
}
