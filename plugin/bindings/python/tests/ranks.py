"""Ranks for tests."""

import os
import sys
import threading

import evenkeel

SCRIPTS = os.path.dirname(sys.executable)
"""Where the package's commands are installed."""

RUN = os.path.join(SCRIPTS, "evenkeel-run")


def threads(size, work, transport="shm", timeout=20.0):
    """Runs ``work(group)`` as so many ranks, threads of this process; gives what they return, or raises what the first raised."""
    store = evenkeel.MemoryStore()
    results, errors = [None] * size, []

    def one(rank):
        try:
            with evenkeel.init(store, rank, size, transport=transport, timeout=timeout) as group:
                results[rank] = work(group)
        except BaseException as error:  # noqa: BLE001 - it is raised below
            errors.append(error)

    running = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]
    return results
