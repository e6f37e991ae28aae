"""Times an operation of torch.distributed over one backend, on ranks of this machine. Prints JSON: the median in seconds for each size."""

import argparse
import datetime
import json
import multiprocessing
import os
import queue
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

import evenkeel.torch  # noqa: F401 - registers the backend

LAYERS = 4
"""Of the model of a DDP step."""
MAX_TIMES = 2000


def operation(name, bytes_, group, size):
    """What is timed, of about this many bytes."""
    if name == "all-reduce":
        tensor = torch.zeros(max(1, bytes_ // 4))
        return lambda: dist.all_reduce(tensor, group=group)
    if name == "ddp-step":
        width = int((bytes_ / 4 / LAYERS) ** 0.5)
        torch.manual_seed(0)
        layers = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
        model = nn.parallel.DistributedDataParallel(layers, process_group=group)
        data = torch.randn(2, width)
        return lambda: model(data).sum().backward()
    elements = bytes_ // 4 // size * size
    whole, part = torch.zeros(elements), torch.zeros(elements // size)
    if name == "all-gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    return lambda: dist.reduce_scatter_tensor(part, whole, group=group)


def median_of(run, seconds):
    """Runs an operation again and again for about this long, and returns the median of its times in seconds."""
    run()
    begun = time.perf_counter()
    run()
    count = max(3, int(seconds / max(time.perf_counter() - begun, 1e-6)))
    # All ranks do the same number.
    number = torch.tensor([min(count, MAX_TIMES)])
    dist.all_reduce(number, op=dist.ReduceOp.MIN)
    times = []
    for _ in range(int(number)):
        # Of the default group: the same barrier for both backends.
        dist.barrier()
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def rank_main(rank, options, folder, results):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), options.ranks)
    dist.init_process_group("evenkeel", store=store, rank=rank, world_size=options.ranks, timeout=datetime.timedelta(minutes=2))
    group = dist.new_group(backend=options.backend)
    times = {}
    for bytes_ in options.bytes:
        times[bytes_] = median_of(operation(options.operation, bytes_, group, options.ranks), options.seconds)
    if rank == 0:
        results.put(times)
    dist.barrier()
    dist.destroy_process_group()


def measure(options):
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork.Process(target=rank_main, args=(rank, options, folder, results)) for rank in range(options.ranks)]
        try:
            for process in ranks:
                process.start()
            while True:
                try:
                    times = results.get(timeout=1)
                    break
                except queue.Empty:
                    failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
                    if failed:
                        raise SystemExit(f"ranks failed: {failed}") from None
            for process in ranks:
                process.join(timeout=60)
            return times
        finally:
            for process in ranks:
                process.kill()
                process.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=("evenkeel", "gloo"))
    parser.add_argument("--operation", required=True, choices=("all-reduce", "ddp-step", "all-gather", "reduce-scatter"))
    parser.add_argument("--ranks", required=True, type=int)
    parser.add_argument("--bytes", required=True, type=lambda text: [int(size) for size in text.split(",")])
    parser.add_argument("--seconds", required=True, type=float, help="of each size, about")
    print(json.dumps({"torch": torch.__version__, "seconds": measure(parser.parse_args())}))


if __name__ == "__main__":
    main()
