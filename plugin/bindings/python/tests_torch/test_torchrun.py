"""Tests of ``evenkeel-run`` with a real torchrun, whose ranks train over backend ``evenkeel`` without importing it."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
from pathlib import Path

from ranks import TIMEOUT

import evenkeel.run

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
{imports}
torch.set_num_threads(1)
dist.init_process_group("evenkeel")
assert os.environ["NCCL_NET_PLUGIN"] == {plugin!r}, os.environ["NCCL_NET_PLUGIN"]
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(8, 4)
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = (model(inputs[dist.get_rank()::2]) - 1).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
print(f"rank {{dist.get_rank()}} of {{dist.get_world_size()}} trained over {{dist.get_backend()}}", flush=True)
{then}
dist.barrier()
dist.destroy_process_group()
"""


def finds_entry_points() -> bool:
    """Whether this torch finds backends by entry points."""
    import torch.distributed as dist

    return hasattr(dist.Backend, "_ensure_backend_registered")


class Torchrun(unittest.TestCase):
    def start(self, then: str = "") -> "subprocess.Popen[str]":
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        script = Path(folder.name) / "train.py"
        imports = "" if finds_entry_points() else "import evenkeel.torch"
        script.write_text(SCRIPT.format(imports=imports, plugin=evenkeel.run.plugin_path(), then=textwrap.dedent(then)))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        command = [sys.executable, "-m", "evenkeel", *torchrun]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
        running = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(running.kill)
        return running

    def test_ranks_of_torchrun_train_and_the_report_says_that_none_used_nccl(self):
        running = self.start()
        out, err = running.communicate(timeout=2 * TIMEOUT.total_seconds())
        self.assertEqual(running.returncode, 0, err)
        self.assertEqual(sorted(out.split("\n")), ["", "rank 0 of 2 trained over evenkeel", "rank 1 of 2 trained over evenkeel"])
        self.assertIn("evenkeel-run: no process of this command used NCCL on this host", err)

    def test_status_of_torchrun_is_passed_on(self):
        running = self.start("if dist.get_rank() == 1:\n    sys.exit(7)")
        _, err = running.communicate(timeout=2 * TIMEOUT.total_seconds())
        # torchrun exits with 1, whatever its ranks do.
        self.assertEqual(running.returncode, 1, err)
        self.assertIn("exitcode", err)

    def test_signal_reaches_torchrun_which_ends_its_ranks(self):
        running = self.start("print(f'process {os.getpid()}', flush=True)\ntime.sleep(600)")
        ranks = []
        while len(ranks) < 2:
            line = running.stdout.readline()
            self.assertTrue(line, "the ranks ended by themselves")
            if line.startswith("process "):
                ranks.append(int(line.split()[1]))
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=2 * TIMEOUT.total_seconds())
        self.assertNotEqual(running.returncode, 0)
        limit = time.monotonic() + TIMEOUT.total_seconds()
        while any(map(exists, ranks)) and time.monotonic() < limit:
            time.sleep(0.05)
        self.assertEqual([rank for rank in ranks if exists(rank)], [])


def exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    unittest.main()
