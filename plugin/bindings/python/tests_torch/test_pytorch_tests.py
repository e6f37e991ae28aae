"""PyTorch's own tests of a backend: what passes with Gloo passes with ``evenkeel``.

``EVENKEEL_TORCH_RESULTS=FOLDER`` keeps the results of each test, as JSON.
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterable
from pathlib import Path

OTHER = {
    "test_ddp_logging_data_cpu": "asks DDP's log for GLOO_SOCKET_IFNAME and two more settings of Gloo's",
}
"""Tests that pass with Gloo and need not with ``evenkeel``, and why."""


def run(backend: str, results: Path, names: Iterable[str] = ()) -> dict[str, list[str]]:
    """The outcome of each test with a backend: of those that are named, or of all."""
    script = Path(__file__).with_name("pytorch_tests.py")
    subprocess.run([sys.executable, script, backend, results, *names], check=True, stdout=subprocess.DEVNULL)
    return json.loads(results.read_text())


class PyTorchsOwnTests(unittest.TestCase):
    def test_what_passes_with_gloo_passes_with_evenkeel(self):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(os.environ.get("EVENKEEL_TORCH_RESULTS", temporary)).resolve()
            gloo = run("gloo", folder / "gloo.json")
            wanted = [name for name, (outcome, _) in gloo.items() if outcome == "pass" and name not in OTHER]
            # Of some three hundred tests, two thirds need GPUs or a feature that Gloo lacks.
            self.assertGreater(len(wanted), 80)
            ours = run("evenkeel", folder / "evenkeel.json", wanted)
            different = {name: why for name, why in ours.items() if why[0] != "pass"}
            # Once more: some tests measure a time, and fail beside other programs.
            again = run("evenkeel", folder / "again.json", different) if different else {}
            failed = {name: why for name, why in again.items() if why[0] != "pass"}
            self.assertEqual(failed, {}, "\n".join(f"{name}: {what}: {why}" for name, (what, why) in failed.items()))


if __name__ == "__main__":
    unittest.main()
