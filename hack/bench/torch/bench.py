"""Times the backend evenkeel of torch.distributed beside Gloo, in the same processes, in turns. Writes a page with tables."""

import argparse
import datetime
import json
import multiprocessing
import os
import pathlib
import platform
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

import evenkeel.torch  # noqa: F401 - registers the backend
import rendezvous

BACKENDS = ("evenkeel", "gloo")
MODEL_MB = 25
RENDEZVOUS = "## Rendezvous"
"""The heading of the part about many ranks."""
TESTS = "## PyTorch's own tests"
"""The heading of the part of the page that this program leaves as it is: the last one."""


def median_of(operation, seconds, barrier):
    """Times an operation for about this long, and returns the median of its times in seconds."""
    operation()
    begun = time.perf_counter()
    operation()
    count = max(3, int(seconds / max(time.perf_counter() - begun, 1e-6)))
    # All ranks do the same number.
    number = torch.tensor([min(count, 2000)])
    dist.all_reduce(number, op=dist.ReduceOp.MIN)
    times = []
    for _ in range(int(number)):
        barrier()
        begun = time.perf_counter()
        operation()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def rank_main(rank, size, folder, sizes, rounds, seconds, results):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), size)
    dist.init_process_group("evenkeel", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(minutes=2))
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    models = {}
    for name, group in groups.items():
        width = int((MODEL_MB * 2**20 / 4 / 4) ** 0.5)
        torch.manual_seed(0)
        layers = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(4)])
        models[name] = nn.parallel.DistributedDataParallel(layers, process_group=group)
    data = torch.randn(2, int((MODEL_MB * 2**20 / 4 / 4) ** 0.5))
    elements = MODEL_MB * 2**20 // 4 // size * size
    whole, part = torch.zeros(elements), torch.zeros(elements // size)

    def step(model):
        model(data).sum().backward()

    def cases():
        for bytes_ in sizes:
            tensor = torch.zeros(max(1, bytes_ // 4))
            yield f"all-reduce {bytes_}", lambda group, _, tensor=tensor: dist.all_reduce(tensor, group=group)
        yield f"DDP step, model of {MODEL_MB} MB", lambda _, model: step(model)
        yield f"all-gather of {MODEL_MB} MB", lambda group, _: dist.all_gather_into_tensor(whole, part, group=group)
        yield f"reduce-scatter of {MODEL_MB} MB", lambda group, _: dist.reduce_scatter_tensor(part, whole, group=group)

    times = {}
    for _ in range(rounds):
        for case, operation in cases():
            for name in BACKENDS:
                group, model = groups[name], models[name]
                timed = median_of(lambda o=operation, g=group, m=model: o(g, m), seconds, dist.barrier)
                times.setdefault(case, {}).setdefault(name, []).append(timed)
    if rank == 0:
        results.put(times)
    dist.barrier()
    dist.destroy_process_group()


def measure(size, sizes, rounds, seconds):
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            fork.Process(target=rank_main, args=(rank, size, folder, sizes, rounds, seconds, results)) for rank in range(size)
        ]
        try:
            for process in ranks:
                process.start()
            times = results.get(timeout=1800)
            for process in ranks:
                process.join(timeout=60)
            return times
        finally:
            for process in ranks:
                process.kill()
                process.join()


def human(seconds):
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def processor():
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as info:
        names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def page(all_times, rounds):
    lines = [
        "# PyTorch on CPUs",
        "",
        "`make bench-torch` measures the backend `evenkeel` beside Gloo, which comes with torch. Both run in the same processes in",
        f"turns, {rounds} rounds. Each time is the least of the rounds' medians, in brackets the greatest. All ranks are on one host.",
        "There `evenkeel` takes shared memory, and Gloo has only TCP. Between hosts: [collectives](collectives.md).",
        "",
        f"Machine: {processor()}. torch {torch.__version__}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}.",
        "Another processor gives other figures; none was measured on one.",
    ]
    for size, times in all_times.items():
        lines += ["", f"## {size} processes", "", "| | evenkeel | Gloo | evenkeel / Gloo |", "|---|---|---|---|"]
        for case, by in times.items():
            ours, theirs = (min(by[name]) for name in BACKENDS)
            cells = [f"{human(min(by[name]))} ({human(max(by[name]))})" for name in BACKENDS]
            name, _, number = case.rpartition(" ")
            shown = f"{name} of {int(number):,} bytes" if number.isdigit() else case
            lines.append(f"| {shown} | {cells[0]} | {cells[1]} | {ours / theirs:.2f} |")
    return "\n".join(lines) + "\n"


def many_ranks(quick, rounds):
    lines = [
        "",
        RENDEZVOUS,
        "",
        "Until the last rank has the sum of one all-reduce, from a `TCPStore` of torch. The median of the rounds, in brackets",
        f"the greatest. All ranks are on one host over TCP, {rendezvous.RANKS_A_PROCESS} to a process. A backend has "
        f"{rendezvous.LIMIT + 60:.0f} s. Measured {datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {rounds} rounds.",
        "",
        *rendezvous.table((16, 64) if quick else (16, 64, 256, 1000), rounds),
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True, help="the page to write, such as docs/results/torch.md")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--rendezvous", action="store_true", help="measure only how long many ranks take to meet; the rest of the page stays")
    options = parser.parse_args()
    sizes = [4**exponent for exponent in range(1, 14, 3 if options.quick else 1)]
    rounds, seconds = (1, 0.1) if options.quick else (3, 0.25)
    output = pathlib.Path(options.output)
    before = output.read_text(encoding="utf-8") if output.exists() else ""
    # What tests found is not measured here.
    measured, heading, found = before.partition("\n" + TESTS)
    if options.rendezvous:
        text = measured.partition("\n" + RENDEZVOUS)[0]
    else:
        all_times = {}
        for size in (2, 4):
            print(f"{size} processes", flush=True)
            all_times[size] = measure(size, sizes, rounds, seconds)
        text = page(all_times, rounds)
    text += many_ranks(options.quick, rounds)
    output.write_text(text + heading + found, encoding="utf-8")
    print(json.dumps({"page": options.output}))


if __name__ == "__main__":
    main()
