"""Test support: ranks as processes that were forked after torch was imported."""

import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)
"""Reached only when something is broken, by a rank that was not stopped on purpose."""


def _one(work, backend, folder, rank, size, timeout, outcomes):
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(os.path.join(folder, "store"), size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        result = work(rank, size)
        if dist.is_initialized():
            dist.destroy_process_group()
        outcomes.put((rank, result, None))
    except BaseException:  # noqa: BLE001 - the parent raises it
        outcomes.put((rank, None, traceback.format_exc()))
        outcomes.close()
        outcomes.join_thread()
        os._exit(1)


def processes(size, work, backend="evenkeel", timeout=TIMEOUT, killed=()):
    """Runs ``work(rank, size)`` on ``size`` processes. Returns their results. ``killed`` ranks do not return."""
    fork = multiprocessing.get_context("fork")
    outcomes = fork.Queue()
    with tempfile.TemporaryDirectory() as folder:
        running = [
            fork.Process(target=_one, args=(work, backend, folder, rank, size, timeout, outcomes)) for rank in range(size)
        ]
        try:
            for process in running:
                process.start()
            results = {}
            while len(results) < size - len(killed):
                rank, result, error = outcomes.get(timeout=3 * TIMEOUT.total_seconds())
                if error is not None:
                    raise AssertionError(f"rank {rank}:\n{error}")
                results[rank] = result
            for process in running:
                process.join(timeout=TIMEOUT.total_seconds())
            return results
        finally:
            for process in running:
                process.kill()
                process.join()
