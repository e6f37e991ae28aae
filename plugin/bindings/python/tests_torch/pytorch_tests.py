"""Runs PyTorch's own tests of a backend of torch.distributed, and writes the result of each as JSON.

    python pytorch_tests.py BACKEND RESULTS.json MODULE [CLASS.TEST...]

The module is ``distributed_test``, which comes with torch, or a file of PyTorch's sources, such as
``test/distributed/test_c10d_gloo.py``. What the tests do for Gloo they do here for the backend: its name takes the place of ``"gloo"``
in the module, and its process group that of Gloo's. Each test runs in a process of its own, which forks the ranks, so that torch is
imported once.
"""

import importlib
import inspect
import json
import linecache
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import types
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

RANKS = 3
"""As in PyTorch's own runs without GPUs. The files of its sources have their own number."""
LIMIT = 180.0
"""Seconds for one test. They end within 20, also beside other programs."""
WITH_TORCH = "distributed_test"
COMMON = "test_c10d_common"
"""A file of PyTorch's sources that the others import."""


def process_group(store: Any, rank: int, size: int, opts: Any = None) -> Any:
    """The process group of the backend ``evenkeel``, in the place of Gloo's."""
    from evenkeel.torch import EvenkeelBackend, EvenkeelProcessGroup

    timeout = getattr(opts, "_timeout", timedelta(minutes=5))
    return EvenkeelProcessGroup(EvenkeelBackend(types.SimpleNamespace(group_rank=rank, group_size=size, store=store, timeout=timeout)))


def load(path: Path, name: str, backend: str) -> types.ModuleType:
    """A file of tests as a module, for this backend."""
    text = path.read_text()
    if backend != "gloo":
        for old, new in (
            ('"gloo"', f'"{backend}"'),
            # Elsewhere, it lists those whose names are in the profiler, which is no matter of which backend is tested.
            ("BACKEND = dist.Backend.NCCL if torch.cuda.is_available() else dist.Backend.GLOO", f'BACKEND = "{backend}"'),
            ("c10d.ProcessGroupGloo(", "process_group("),
            # Selects Gloo's network, which another backend has not.
            ("backend.create_device(interface=LOOPBACK)", "pass"),
        ):
            text = text.replace(old, new)
    module = types.ModuleType(name)
    module.__file__, module.__package__ = str(path), name.rpartition(".")[0]
    module.process_group = process_group
    sys.modules[name] = module
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    exec(compile(text, str(path), "exec"), module.__dict__)  # noqa: S102 - PyTorch's own file
    return module


def cases(backend: str, module: str) -> dict[str, type[unittest.TestCase]]:
    """The classes of tests of a module, with ranks that are forked. PyTorch spawns them, and each imports torch anew."""
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", TEMP_DIR=tempfile.mkdtemp())
    import torch
    from torch.testing._internal import common_distributed

    if backend != "gloo":
        importlib.import_module(f"{backend}.torch")
    torch.set_num_threads(1)
    for name, backends in common_distributed.DistTestCases.backend_feature.items():
        if "gloo" in backends or name == "plugin":
            backends.add(backend)
    fork = multiprocessing.get_context("fork").Process

    if module == WITH_TORCH:
        path = Path(torch.__file__).parent / "testing" / "_internal" / "distributed" / "distributed_test.py"
        loaded = load(path, "torch.testing._internal.distributed.distributed_test", backend)

        class Tests(loaded.TestDistBackend, loaded.DistributedTest._DistTestBase):
            def setUp(self) -> None:
                super().setUp()
                self._start_processes(fork)

        return {"DistributedTest": Tests}

    common_distributed.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(fork)
    path = Path(module)
    sys.path.insert(0, str(path.parent))
    loaded = load(path.parent / f"{COMMON}.py", COMMON, backend)
    if path.stem != COMMON:
        loaded = load(path, path.stem, backend)
    return {
        name: found
        for name, found in sorted(vars(loaded).items())
        if inspect.isclass(found) and issubclass(found, unittest.TestCase) and found.__module__ == path.stem
    }


def outcome(tests: type[unittest.TestCase], name: str) -> list[str]:
    """Runs a test. Returns "pass", "skip", "fail" or "hang", and why."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        result = unittest.TestResult()
        tests(name).run(result)
        bad = result.errors + result.failures
        if bad:
            found = ["fail", bad[0][1]]
        elif result.skipped:
            found = ["skip", result.skipped[0][1]]
        else:
            found = ["pass", ""]
        os.write(writer, json.dumps([found[0], found[1][-4000:]]).encode())
        os._exit(0)
    os.close(writer)
    text = b""
    try:
        while select.select([reader], [], [], LIMIT)[0] and (part := os.read(reader, 65536)):
            text += part
    finally:
        os.close(reader)
        try:
            os.killpg(child, signal.SIGKILL)  # and ranks that it has left
        except ProcessLookupError:
            pass
        os.waitpid(child, 0)
    return json.loads(text) if text else ["hang", f"no result within {LIMIT:.0f} seconds, or the process died"]


def main(backend: str, results: str, module: str, chosen: list[str]) -> None:
    found = {}
    for class_name, tests in cases(backend, module).items():
        for test in unittest.TestLoader().getTestCaseNames(tests):
            name = f"{class_name}.{test}"
            if not chosen or name in chosen:
                found[name] = outcome(tests, test)
                Path(results).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
