"""Test of the example."""

import subprocess
import sys
import unittest
from pathlib import Path

from ranks import RUN

TRAIN = Path(__file__).resolve().parent.parent / "examples" / "train.py"


class Example(unittest.TestCase):
    def test_three_ranks_train_a_model(self):
        ran = subprocess.run([RUN, "-n", "3", sys.executable, str(TRAIN)], capture_output=True, text=True, timeout=120)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertRegex(ran.stdout, r"3 ranks, 300 steps: loss from [\d.]+ to [\d.]+; all ranks have the same weights")


if __name__ == "__main__":
    unittest.main()
