"""Tests of the flight recorder's files. That PyTorch's reader understands them is tested in tests_torch."""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
import unittest
from array import array
from pathlib import Path

import evenkeel
from evenkeel._operation import torch_note
from ranks import threads

STUCK = """
import sys
from array import array
import evenkeel

group = evenkeel.init(sys.argv[1], int(sys.argv[2]), 2, transport="tcp:lo", timeout=20)
if group.rank == 1:
    sys.stdin.read()
    raise SystemExit
try:
    group.allreduce(array("d", [1.0] * 5), timeout=1, note="the fifth step")
except evenkeel.TimeoutError as error:
    print(error)
"""
"""Rank 0 calls an operation that rank 1 does not call before its input ends."""

ASKED = """
import sys
from array import array
import evenkeel

group = evenkeel.init(sys.argv[1], int(sys.argv[2]), 2, transport="tcp:lo", timeout=60)
if group.rank == 1:
    sys.stdin.read()
group.allreduce(array("d", [1.0] * 5))
group.close()
"""
"""Rank 0 calls an operation that rank 1 calls once its input has ended, and both answer requests meanwhile."""


def load(path):
    with open(path, "rb") as file:
        return pickle.load(file)


class FlightRecorder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def test_file_has_the_calls_of_its_rank(self):
        def work(group):
            group.set_name("training", [4, 2, 7])
            group.allreduce(array("f", [1.0] * 6))
            group.allgather(array("b", [0] * 6), counts=[1, 2, 3])
            if group.rank < 2:
                message = array("b", [0] * 8)
                group.send(message[:5], 1) if group.rank == 0 else group.recv(message)
            group.broadcast(array("i", [1, 2]), root=1, tag=3)
            path = evenkeel.dump_flight_recorder(os.path.join(self.folder, f"rank_{group.rank}"), rank=[4, 2, 7][group.rank])
            group.barrier()
            return load(path)

        dumps = threads(3, work)
        for rank, dump in enumerate(dumps):
            self.assertEqual(dump["version"], "2.10")
            # Groups of other tests are listed as long as a call of theirs is kept.
            listed = [(name, value) for name, value in dump["pg_config"].items() if name.startswith("training")]
            config = {name: (value["desc"], value["ranks"]) for name, value in listed}
            self.assertEqual(config.pop("training"), ("undefined", "[4, 2, 7]"))
            self.assertEqual(config.pop("training tag 3"), ("undefined", "[4, 2, 7]"))
            self.assertEqual(config, {"training 4->2": ("undefined", "[2, 4]")} if rank < 2 else {})
            # The group was joined with a barrier.
            entries = [entry for entry in dump["entries"] if entry["process_group"][0].startswith("training")][1:]
            message = [[("nccl:send 1->0", 1, [[5]], [[0]])], [("nccl:recv 0<-1", 1, [[0]], [[5]])], []][rank]
            self.assertEqual(
                [(e["profiling_name"], e["collective_seq_id"], e["input_sizes"], e["output_sizes"]) for e in entries],
                [
                    ("nccl:all_reduce", 1, [[6]], [[6]]),
                    ("nccl:all_gather_v", 2, [[6]], [[6]]),
                    *message,
                    ("nccl:broadcast", 0, [[8]], [[8]]),
                ],
            )
            self.assertEqual({entry["state"] for entry in entries}, {"completed"})
            self.assertEqual((entries[0]["input_dtypes"], entries[0]["is_p2p"]), (["float32"], False))
            numbers = [entry["record_id"] for entry in entries]
            self.assertEqual(numbers, sorted(set(numbers)))
            self.assertEqual(dump["pg_status"]["training"]["last_completed_collective"], 2)
        self.assertTrue(all(Path(self.folder, f"rank_{rank}").exists() for rank in range(3)))
        self.assertEqual(len(os.listdir(self.folder)), 3)

    def test_call_that_waits_its_turn_is_scheduled(self):
        def work(group):
            if group.rank == 1:
                # Once the message is there, rank 0 has written the file.
                group.recv(array("b", [0]), 0)
            note = torch_note("all_reduce", [[3, 1]], [[3, 1]], "float64")
            calls = [group.allreduce(array("d", [1.0] * 2), wait=False), group.allreduce(array("d", [1.0] * 3), note=note, wait=False)]
            entries = []
            if group.rank == 0:
                path = evenkeel.dump_flight_recorder(os.path.join(self.folder, "rank_0"), rank=0)
                entries = load(path)["entries"]
                group.send(array("b", [0]), 1)
            for call in calls:
                call.wait()
            return entries

        last = threads(2, work)[0][-1]
        self.assertEqual((last["state"], last["profiling_name"], last["collective_seq_id"]), ("scheduled", "nccl:all_reduce", 2))
        self.assertEqual((last["input_sizes"], last["output_dtypes"]), ([[3, 1]], ["float64"]))
        self.assertIsNone(last["time_discovered_started_ns"])

    def test_failed_call_writes_a_file_that_names_the_missing_rank(self):
        prefix = os.path.join(self.folder, "trace_")
        environment = {**os.environ, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/wrong/", "EVENKEEL_FLIGHT_RECORDER": prefix}
        with evenkeel.StoreServer() as store:
            running = [
                subprocess.Popen(
                    [sys.executable, "-c", STUCK, store.address, str(rank)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
                for rank in range(2)
            ]
            out, err = running[0].communicate(timeout=60)
            running[1].communicate(timeout=60)
        # Rank 1 has not failed. Its record shows after a second that it is there.
        written = sorted({*os.listdir(self.folder)} - {".evenkeel-record-1.json"})
        self.assertEqual(written, [".evenkeel-record-0.json", "trace_0"], err)
        entry = load(f"{prefix}0")["entries"][-1]
        self.assertEqual((entry["profiling_name"], entry["collective_seq_id"], entry["state"]), ("nccl:all_reduce", 1, "started"))
        self.assertEqual((entry["input_sizes"], entry["timeout_ms"]), ([[5]], 1000))
        own = entry["evenkeel"]
        self.assertEqual((own["state"], own["note"], own["failure"]["ranks"]), ("failed", "the fifth step", [1]))
        # The error that was raised is in the file, and on stderr.
        self.assertEqual(own["failure"]["message"], out.strip())
        record = Path(self.folder, ".evenkeel-record-0.json").read_text()
        self.assertEqual(err, f"evenkeel: wrote the flight recorder to {prefix}0: {out}evenkeel: flight record: {record}\n")
        call = json.loads(record)["calls"][-1]
        self.assertEqual((call["operation"], call["number"], call["state"]), ("all_reduce", 1, "failed"))
        self.assertEqual(call["failure"], out.strip())

    def test_record_is_written_on_request_while_a_call_hangs(self):
        environment = {**os.environ, "EVENKEEL_FLIGHT_RECORDER": os.path.join(self.folder, "trace_")}
        record = Path(self.folder, ".evenkeel-record-0.json")

        def ask(process):
            """Asks until the record shows the call, which may not have begun when it was first asked for."""
            deadline = time.monotonic() + 60
            while True:
                Path(self.folder, ".evenkeel-request").write_text("")
                if record.exists() and (calls := json.loads(record.read_text())["calls"])[-1]["state"] == "started":
                    return calls
                self.assertIsNone(process.poll())
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.1)

        with evenkeel.StoreServer() as store:
            processes = [
                subprocess.Popen([sys.executable, "-c", ASKED, store.address, str(rank)], stdin=subprocess.PIPE, text=True, env=environment)
                for rank in range(2)
            ]
            # Rank 1 calls it once its input ends.
            last, hangs = ask(processes[0])
            for process in reversed(processes):
                process.communicate(timeout=60)
        self.assertEqual([process.returncode for process in processes], [0, 0])
        self.assertEqual((last["state"], last["operation"], last["number"]), ("completed", "barrier", 0))
        self.assertEqual((hangs["operation"], hangs["number"], hangs["type"], hangs["input_bytes"]), ("all_reduce", 1, "float64", 40))
        self.assertTrue(os.path.exists(os.path.join(self.folder, "trace_0")))

    def test_nothing_is_written_unasked(self):
        text = "import evenkeel; evenkeel.dump_flight_recorder()"
        for more, reason in [("", "has no group"), ("rank=0", "set EVENKEEL_FLIGHT_RECORDER")]:
            environment = {name: value for name, value in os.environ.items() if "TORCH" not in name}
            program = text.replace("()", f"({more})")
            ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
            self.assertEqual(ran.returncode, 1)
            self.assertIn(reason, ran.stderr.splitlines()[-1])


if __name__ == "__main__":
    unittest.main()
