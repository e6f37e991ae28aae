"""Test support: ranks as threads."""

import os
import sys
import threading

import evenkeel

SCRIPTS = os.path.dirname(sys.executable)
"""The folder with the package's commands."""

RUN = os.path.join(SCRIPTS, "evenkeel-run")


def threads(size, work, transport="shm", timeout=20.0):
    """Runs ``work(group)`` on ``size`` ranks, threads of this process. Returns their results, or raises the first exception."""
    store = evenkeel.MemoryStore()

    def one(rank):
        with evenkeel.init(store, rank, size, transport=transport, timeout=timeout) as group:
            return work(group)

    return run_threads(size, one)


def run_threads(size, work):
    """Runs ``work(rank)`` in ``size`` threads. Returns their results, or raises the first exception."""
    results, errors = [None] * size, []

    def one(rank):
        try:
            results[rank] = work(rank)
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
