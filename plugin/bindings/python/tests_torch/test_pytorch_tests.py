"""PyTorch's own tests of a backend: what passes with Gloo passes with ``evenkeel``.

``EVENKEEL_PYTORCH_TESTS`` is the folder ``test/distributed`` of PyTorch's sources. ``EVENKEEL_TORCH_RESULTS=FOLDER`` keeps the results
of each test, as JSON.
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterable
from pathlib import Path

NAMED_CUSTOM = "wants a backend that is not PyTorch's to be named custom"
OTHER = {
    "DistributedTest.test_ddp_logging_data_cpu": "asks DDP's log for GLOO_SOCKET_IFNAME and two more settings of Gloo's",
    "ProcessGroupGlooTest.test_set_gloo_pg_timeout": "reads the timeout from Gloo's own options",
    "ProcessGroupGlooTest.test_allgather_checks": "wants an error for parts of unequal sizes, which can be gathered here, as with NCCL",
    "GlooProcessGroupWithDispatchedCollectivesTests.test_all_to_all_single": "wants an error for a tensor that is not contiguous, "
    "which can be sent here",
    "GlooProcessGroupWithDispatchedCollectivesTests.test_init_process_group_for_all_backends": NAMED_CUSTOM,
    "ProcessGroupWithDispatchedCollectivesTests.test_init_process_group_for_all_backends": NAMED_CUSTOM,
}
"""Tests that pass with Gloo and need not with ``evenkeel``, and why."""


def run(backend: str, results: Path, module: str, names: Iterable[str] = ()) -> dict[str, list[str]]:
    """The outcome of each test with a backend: of those that are named, or of all."""
    script = Path(__file__).with_name("pytorch_tests.py")
    subprocess.run([sys.executable, script, backend, results, module, *names], check=True, stdout=subprocess.DEVNULL)
    return json.loads(results.read_text())


class PyTorchsOwnTests(unittest.TestCase):
    def check(self, module: str, least: int) -> None:
        """What passes with Gloo passes with ``evenkeel``, and these are no fewer than `least`."""
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(os.environ.get("EVENKEEL_TORCH_RESULTS", temporary)).resolve()
            stem = Path(module).stem
            gloo = run("gloo", folder / f"{stem}.gloo.json", module)
            passed = [name for name, (outcome, _) in gloo.items() if outcome == "pass"]
            self.assertGreaterEqual(len(passed), least)
            wanted = [name for name in passed if name not in OTHER]
            ours = run("evenkeel", folder / f"{stem}.evenkeel.json", module, wanted)
            different = {name: why for name, why in ours.items() if why[0] != "pass"}
            # Once more: some tests measure a time, and fail beside other programs.
            again = run("evenkeel", folder / f"{stem}.again.json", module, different) if different else {}
            failed = {name: why for name, why in again.items() if why[0] != "pass"}
            self.assertEqual(failed, {}, "\n".join(f"{name}: {what}: {why}" for name, (what, why) in failed.items()))

    def source(self, name: str) -> str:
        folder = os.environ.get("EVENKEEL_PYTORCH_TESTS")
        self.assertIsNotNone(folder, "EVENKEEL_PYTORCH_TESTS is not set: the folder test/distributed of PyTorch's sources")
        return str(Path(folder, f"{name}.py"))

    # Of all tests, two thirds need GPUs or a feature that Gloo lacks.

    def test_distributed_test(self):
        self.check("distributed_test", 80)

    def test_c10d_gloo(self):
        self.check(self.source("test_c10d_gloo"), 60)

    def test_c10d_common(self):
        self.check(self.source("test_c10d_common"), 20)

    def test_c10d_object_collectives(self):
        self.check(self.source("test_c10d_object_collectives"), 9)


if __name__ == "__main__":
    unittest.main()
