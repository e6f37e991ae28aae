/* Fibers: the blocks of a kernel, and in a block the directions that work at the same time, take turns on the stream's thread. */
#ifndef FIBERS_H
#define FIBERS_H

#include <stdint.h>

/* fiber_start adds a fiber to those of this thread. Its done becomes 1 at its end. */
void fiber_start(void (*body)(void *), void *argument, int *done);

/* fibers_run runs all fibers of this thread until they have ended. When *abort is set, they end where they wait. */
void fibers_run(const uint32_t *abort);

/* fiber_wait_turn lets the other fibers run. It does not return after an abort. */
void fiber_wait_turn(void);

/* fiber_progressed says that a wait has ended; a thread whose fibers all wait gives way to others. */
void fiber_progressed(void);

#define WAIT_UNTIL(condition)  \
  do {                         \
    while (!(condition)) fiber_wait_turn(); \
    fiber_progressed();        \
  } while (0)

#endif
