"""Runs PyTorch's own tests of a backend of torch.distributed, and writes the result of each as JSON.

    python pytorch_tests.py BACKEND RESULTS.json [NAME...]

They are those of ``torch.testing._internal.distributed.distributed_test``, which come with torch. What they do for Gloo they do here for
the backend: its name takes the place of ``"gloo"`` in the module. Each test runs in a process of its own, which forks the ranks, so
that torch is imported once.
"""

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
from pathlib import Path

RANKS = 3
"""As in PyTorch's own runs without GPUs."""
LIMIT = 180.0
"""Seconds for one test. They end within 20, also beside other programs."""
MODULE = "torch.testing._internal.distributed.distributed_test"


def load(backend: str) -> types.ModuleType:
    """PyTorch's module of tests, for this backend. It reads its settings when it is imported."""
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", TEMP_DIR=tempfile.mkdtemp())
    import torch
    from torch.testing._internal.common_distributed import DistTestCases

    for name, backends in DistTestCases.backend_feature.items():
        if "gloo" in backends or name == "plugin":
            backends.add(backend)
    torch.set_num_threads(1)
    path = Path(torch.__file__).parent / "testing" / "_internal" / "distributed" / "distributed_test.py"
    text = path.read_text().replace('"gloo"', f'"{backend}"')
    module = types.ModuleType(MODULE)
    module.__file__, module.__package__ = str(path), MODULE.rpartition(".")[0]
    sys.modules[MODULE] = module
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    exec(compile(text, str(path), "exec"), module.__dict__)  # noqa: S102 - torch's own file
    return module


def cases(module: types.ModuleType) -> type[unittest.TestCase]:
    """The tests, with ranks that are forked. PyTorch spawns them, and each imports torch anew."""

    class Tests(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Tests


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


def main(backend: str, results: str, chosen: list[str]) -> None:
    tests = cases(load(backend))
    names = chosen or unittest.TestLoader().getTestCaseNames(tests)
    found = {}
    for name in names:
        found[name] = outcome(tests, name)
        Path(results).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
