"""Tests of the process group of torchft."""

import unittest
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions, BarrierOptions, ReduceOp

import evenkeel
from ranks import TIMEOUT

try:
    from evenkeel.torchft import ProcessGroupEvenkeel
except ImportError as error:
    missing = str(error)
else:
    missing = ""


def everywhere(groups, work):
    """Runs `work(rank, group)` for all groups at once, each in a thread, and returns the results."""
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(work, range(len(groups)), groups))


@unittest.skipIf(missing, f"torchft is needed: {missing}")
class ProcessGroup(unittest.TestCase):
    def setUp(self):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def configure(self, groups, quorum):
        """Configures the groups for a quorum of all of them."""
        address = f"127.0.0.1:{self.store.port}/quorum/{quorum}"
        everywhere(groups, lambda rank, group: group.configure(address, str(rank), rank, len(groups)))

    def sums(self, groups):
        def work(rank, group):
            tensor = torch.full((5,), float(rank + 1))
            group.allreduce([tensor], AllreduceOptions()).wait()
            return tensor.tolist()

        return everywhere(groups, work)

    def test_each_quorum_has_a_group_of_its_own(self):
        groups = [ProcessGroupEvenkeel(TIMEOUT) for _ in range(3)]
        self.configure(groups, 1)
        self.assertEqual([group.size() for group in groups], [3] * 3)
        self.assertEqual(self.sums(groups), [[6.0] * 5] * 3)
        # A message of the old quorum that nobody has received does not arrive in the new one.
        groups[0].send([torch.tensor([1.0])], 1, 0)
        self.configure(groups[:2], 2)
        groups[0].send([torch.tensor([2.0])], 1, 0)
        received = torch.zeros(1)
        groups[1].recv([received], 0, 0).wait()
        self.assertEqual(received.item(), 2)
        self.assertEqual(self.sums(groups[:2]), [[3.0] * 5] * 2)
        self.assertIsNone(groups[0].errored())

    def test_abort_ends_what_is_in_progress_and_the_next_quorum_works(self):
        groups = [ProcessGroupEvenkeel(TIMEOUT) for _ in range(2)]
        self.configure(groups, 1)
        own, other = groups
        works = [own.allreduce([torch.ones(3)], ReduceOp.SUM), own.recv([torch.ones(3)], 0, 7), own.recv([torch.ones(3)], 1, 8)]
        futures = [work.get_future() for work in works]
        self.assertIsNone(own.errored())
        own.abort()
        for work, future in zip(works, futures, strict=True):
            with self.assertRaises(evenkeel.AbortedError):
                work.wait()
            with self.assertRaisesRegex(RuntimeError, "aborted"):
                future.wait()
        self.assertIsInstance(own.errored(), evenkeel.AbortedError)
        # The other one has nothing in progress. Its next operation fails, and it knows of it.
        with self.assertRaises(evenkeel.AbortedError):
            other.barrier(BarrierOptions()).wait()
        self.assertIsInstance(other.errored(), evenkeel.AbortedError)
        self.configure(groups, 2)
        self.assertEqual([group.errored() for group in groups], [None, None])
        self.assertEqual(self.sums(groups), [[3.0] * 5] * 2)

    def test_timeout_is_that_of_later_operations(self):
        groups = [ProcessGroupEvenkeel(TIMEOUT) for _ in range(2)]
        self.configure(groups, 1)
        groups[0].set_timeout(timedelta(seconds=0.2))
        with self.assertRaises(evenkeel.TimeoutError):
            groups[0].allreduce([torch.ones(3)], AllreduceOptions()).wait()

    def test_configure_fails_when_a_replica_does_not_come(self):
        group = ProcessGroupEvenkeel(timedelta(seconds=0.2))
        with self.assertRaisesRegex(RuntimeError, "rank 1"):
            group.configure(f"127.0.0.1:{self.store.port}/quorum/1", "0", 0, 2)
        self.assertIsInstance(group.errored(), evenkeel.AbortedError)

    def test_shutdown_lets_the_others_have_what_was_sent(self):
        groups = [ProcessGroupEvenkeel(TIMEOUT) for _ in range(2)]
        self.configure(groups, 1)
        groups[0].send([torch.tensor([4.0])], 1, 0).wait()
        groups[0].shutdown()
        received = torch.zeros(1)
        groups[1].recv([received], 0, 0).wait()
        self.assertEqual(received.item(), 4)


if __name__ == "__main__":
    unittest.main()
