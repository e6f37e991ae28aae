"""PyTorch's own reader of flight recorders reads ours, of jobs that hang."""

import json
import os
import pickle
import tempfile
import time
import unittest
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

import evenkeel.torch
from ranks import TIMEOUT, processes

try:
    from torch.distributed.flight_recorder import fr_trace
except ImportError:
    fr_trace = None


def await_file(path):
    """Waits as a rank that is stuck elsewhere: it calls nothing."""
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while not os.path.exists(path):
        assert time.monotonic() < deadline, f"no file {path}"
        time.sleep(0.05)


def await_record(folder, rank, is_there):
    """Asks until the record of a stuck rank has what it is to have. Returns it."""
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while True:
        with open(os.path.join(folder, ".evenkeel-request"), "w"):
            pass
        with open(os.path.join(folder, f".evenkeel-record-{rank}.json"), encoding="utf-8") as file:
            record = json.load(file)
        if is_there(record):
            return record
        assert time.monotonic() < deadline, record
        time.sleep(0.1)


class Requests(unittest.TestCase):
    def test_ranks_that_hang_tell_what_they_are_in(self):
        def work(rank, size):
            dist.all_reduce(torch.ones(3))
            record = None
            if rank == 0:
                record = await_record(folder, 1, lambda record: record["calls"][-1]["state"] == "started")
            dist.all_gather([torch.zeros(2, 3) for _ in range(size)], torch.ones(2, 3))
            return record

        with tempfile.TemporaryDirectory() as folder:
            with mock.patch.dict(os.environ, {"EVENKEEL_FLIGHT_RECORDER": os.path.join(folder, "trace_rank_")}):
                record = processes(2, work)[0]
        self.assertEqual((record["version"], record["rank"]), (1, 1))
        self.assertEqual([(group["name"], group["ranks"]) for group in record["groups"]], [("default_pg", [0, 1])])
        calls = [(call["operation"], call["number"], call["type"], call["state"]) for call in record["calls"]]
        self.assertEqual(calls, [("all_reduce", 1, "float32", "completed"), ("all_gather", 2, "float32", "started")])


@unittest.skipIf(fr_trace is None, f"torch {torch.__version__} has no flight recorder's reader in its package")
class FlightRecorder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.prefix = os.path.join(folder.name, "trace_rank_")
        variables = mock.patch.dict(os.environ, {"EVENKEEL_FLIGHT_RECORDER": self.prefix})
        variables.start()
        self.addCleanup(variables.stop)

    def read(self):
        """What the reader says, and the calls that it has matched."""
        database = os.path.join(self.folder, "database")
        with self.assertLogs("Flight Recorder", "INFO") as log:
            fr_trace.main([self.folder, "--prefix", "trace_rank_", "-o", database])
        with open(database, "rb") as file:
            _, found = pickle.load(file)
        return "\n".join(record.getMessage() for record in log.records), found

    def test_reader_names_the_call_and_the_ranks_of_a_hung_job(self):
        def work(rank, size):
            pair = dist.new_group([1, 3], group_desc="a pair")
            for _ in range(2):
                dist.all_reduce(torch.ones(3))
            parts = [torch.zeros(part + 1) for part in range(size)]
            dist.all_gather(parts, torch.ones(rank + 1))
            if rank in (1, 3):
                dist.all_reduce(torch.ones(1), group=pair)
            if rank < 2:
                other = torch.ones(2)
                dist.send(other, 1) if rank == 0 else dist.recv(other, 0)
            try:
                if rank < 2:
                    dist.all_reduce(torch.ones(2, 3))
                elif rank == 2:
                    dist.broadcast(torch.ones(7), 2)
            except RuntimeError:
                assert rank < 3
            await_file(f"{self.prefix}{rank}")

        processes(4, work, timeout=timedelta(seconds=5))
        text, found = self.read()
        self.assertIn("Not all ranks joining collective, sequence number: 4", text)
        self.assertIn("collective: nccl:all_reduce", text)
        self.assertIn("missing ranks: {3}", text)
        self.assertIn("input sizes: [[2, 3]]", text)
        self.assertIn("default_pg", text)
        hung = [call for call in found.collectives if not call.pass_check]
        self.assertEqual([call.collective_seq_id for call in hung], [4])
        self.assertEqual({rank: other.collective_name for rank, other in hung[0].mismatch_collectives.items()}, {2: "nccl:broadcast"})
        # Everything before it matches: of the whole group, of a part of it, and the message.
        matched = [(call.pg_desc.partition(":")[2], call.collective_name) for call in found.collectives if call.pass_check]
        self.assertEqual(matched.count(("default_pg", "nccl:all_reduce")), 2)
        self.assertIn(("default_pg", "nccl:all_gather_v"), matched)
        self.assertIn(("a pair", "nccl:all_reduce"), matched)
        # The reader names a pair by the end that it meets first.
        self.assertTrue({("default_pg", "nccl:send 0->1"), ("default_pg", "nccl:recv 1<-0")} & set(matched), matched)

    def test_files_of_a_timeout_say_which_rank_is_missing(self):
        def work(rank, size):
            if rank != 2:
                try:
                    dist.barrier()
                except RuntimeError as error:
                    assert "rank 2" in str(error), error
                else:
                    raise AssertionError("the barrier ended without rank 2")
            await_file(f"{self.prefix}{rank}")
            with open(f"{self.prefix}{rank}", "rb") as file:
                return pickle.load(file)

        dumps = processes(3, work, timeout=timedelta(seconds=3))
        text, _ = self.read()
        self.assertIn("collective: nccl:barrier", text)
        self.assertIn("missing ranks: {2}", text)
        failures = [dumps[rank]["entries"][-1]["evenkeel"]["failure"] for rank in (0, 1)]
        for failure in failures:
            self.assertEqual(failure["ranks"], [2])
            self.assertIn("timeout", failure["message"])


if __name__ == "__main__":
    unittest.main()
