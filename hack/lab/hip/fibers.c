#include "fibers.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <ucontext.h>

enum { MAX_FIBERS = 128, STACK_BYTES = 512 << 10, TURNS_BEFORE_SLEEP = 64, SLEEP_NANOSECONDS = 50000 };

struct fiber {
  ucontext_t context;
  void (*body)(void *);
  void *argument;
  int *done, live;
  char *stack; /* kept for the next fiber */
};

static __thread struct {
  ucontext_t scheduler;
  struct fiber fibers[MAX_FIBERS];
  struct fiber *current;
  const uint32_t *abort;
  int progressed;
} thread;

static void end(void) {
  thread.current->live = 0;
  *thread.current->done = 1;
  thread.progressed = 1;
  swapcontext(&thread.current->context, &thread.scheduler);
}

static void enter(void) {
  thread.current->body(thread.current->argument);
  end();
}

void fiber_start(void (*body)(void *), void *argument, int *done) {
  struct fiber *f = thread.fibers;
  while (f < thread.fibers + MAX_FIBERS && f->live) f++;
  if (f == thread.fibers + MAX_FIBERS || (!f->stack && !(f->stack = malloc(STACK_BYTES)))) {
    fprintf(stderr, "lab: no room for another fiber\n");
    abort();
  }
  f->body = body, f->argument = argument, f->done = done, f->live = 1;
  *done = 0;
  getcontext(&f->context);
  f->context.uc_stack.ss_sp = f->stack, f->context.uc_stack.ss_size = STACK_BYTES, f->context.uc_link = NULL;
  makecontext(&f->context, enter, 0);
}

void fibers_run(const uint32_t *abort) {
  thread.abort = abort;
  for (int idle = 0, live = 1; live;) {
    live = thread.progressed = 0;
    for (struct fiber *f = thread.fibers; f < thread.fibers + MAX_FIBERS; f++) {
      if (!f->live) continue;
      live = 1;
      thread.current = f;
      swapcontext(&thread.scheduler, &f->context);
    }
    idle = thread.progressed ? 0 : idle + 1;
    if (idle > TURNS_BEFORE_SLEEP) nanosleep(&(struct timespec){.tv_nsec = SLEEP_NANOSECONDS}, NULL);
    else if (idle) sched_yield();
  }
}

void fiber_wait_turn(void) {
  if (__atomic_load_n(thread.abort, __ATOMIC_ACQUIRE)) end();
  swapcontext(&thread.current->context, &thread.scheduler);
}

void fiber_progressed(void) { thread.progressed = 1; }
