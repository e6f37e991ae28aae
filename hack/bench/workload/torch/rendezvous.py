"""Times how long many ranks take to find each other and make one all-reduce, over one backend. Prints JSON: seconds for each number."""

import argparse
import datetime
import json
import multiprocessing
import queue
import resource
import threading
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

import evenkeel

RANKS_A_PROCESS = 16
"""So that a thousand fit into one machine. Threads of one process are as apart as processes for both backends: they use TCP."""
STACK_BYTES = 512 << 10
LIMIT = 120.0
"""Seconds until a backend is given up."""


def meet_evenkeel(store, rank, size):
    group = evenkeel.init(store, rank, size, transport="tcp", timeout=LIMIT)
    one = torch.ones(1)
    group.allreduce(one.numpy())
    return group, one


def meet_gloo(store, rank, size):
    options = ProcessGroupGloo._Options()
    options._timeout = datetime.timedelta(seconds=LIMIT)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = ProcessGroupGloo(store, rank, size, options)
    one = torch.ones(1)
    group.allreduce([one]).wait()
    return group, one


MEET = {"evenkeel": meet_evenkeel, "gloo": meet_gloo}


def process_main(backend, port, first, count, size, begin, results, leave):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(STACK_BYTES)
    torch.set_num_threads(1)
    groups = []

    def rank_main(rank):
        try:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=LIMIT))
            begin.wait()
            started = time.monotonic()
            group, one = MEET[backend](dist.PrefixStore(backend, store), rank, size)
            taken = time.monotonic() - started
            groups.append(group)
            results.put(taken if one.item() == size else SystemExit(f"rank {rank} has the sum {one.item()}, not {size}"))
        except Exception as error:  # noqa: BLE001 - the page says it
            results.put(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(first, first + count)]
    for thread in threads:
        thread.start()
    leave.wait()


def time_of(backend, size):
    """Seconds until the last of these ranks had the sum, or why they have not met. A wrong sum ends the program."""
    fork = multiprocessing.get_context("fork")
    begin, results, leave = fork.Barrier(size), fork.Queue(), fork.Event()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        fork.Process(target=process_main, args=(backend, store.port, first, min(RANKS_A_PROCESS, size - first), size, begin, results, leave))
        for first in range(0, size, RANKS_A_PROCESS)
    ]
    try:
        for process in processes:
            process.start()
        slowest, end = 0.0, time.monotonic() + LIMIT + 60
        for _ in range(size):
            try:
                found = results.get(timeout=max(end - time.monotonic(), 0.1))
            except queue.Empty:
                return f"no end within {LIMIT + 60:.0f} s"
            if isinstance(found, SystemExit):
                raise found
            if isinstance(found, str):
                return found
            slowest = max(slowest, found)
        return slowest
    finally:
        leave.set()
        for process in processes:
            if process.pid is not None:  # it was started
                process.kill()
                process.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=tuple(MEET))
    parser.add_argument("--ranks", required=True, type=lambda text: [int(size) for size in text.split(",")])
    options = parser.parse_args()
    seconds, missed = {}, {}
    for size in options.ranks:
        found = time_of(options.backend, size)
        (missed if isinstance(found, str) else seconds)[size] = found
    print(json.dumps({"torch": torch.__version__, "seconds": seconds, "missed": missed}))


if __name__ == "__main__":
    main()
