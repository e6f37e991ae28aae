"""Tests of processes that fork, as data loaders do, and of the programs that they start."""

import os
import signal
import subprocess
import sys
import unittest

import numpy as np

import evenkeel
from ranks import threads

TRANSPORTS = ("shm", "tcp:lo", "auto:lo")


class Child:
    """A forked child that does something, and ends."""

    def __init__(self, work):
        read, write = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            signal.alarm(60)
            try:
                said = work()
            except BaseException as error:  # noqa: BLE001 - the parent looks at it
                said = f"{type(error).__name__}: {error}"
            os.write(write, str(said).encode())
            os._exit(0)
        os.close(write)
        self.read = read

    def result(self):
        """What the work has returned, or its error, as text."""
        with open(self.read, encoding="utf-8") as text:
            said = text.read()
        status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        return said if status == 0 else f"ended with {status}: {said}"


def outcome(call):
    """What a call raises, or "nothing"."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Forks(unittest.TestCase):
    def test_forked_child_gets_errors_and_leaves_its_parents_group_alone(self):
        def calls(group):
            return "\n".join(
                outcome(call)
                for call in (
                    lambda: group.allreduce(np.ones(4)),
                    lambda: group.allreduce(np.ones(4), wait=False).wait(),
                    lambda: group.send(np.ones(1), 1 - group.rank),
                    lambda: group.recv(np.ones(1)),
                    lambda: group.sub_group([0, 1]).barrier(),
                    lambda: group.reconfigure(),
                    lambda: group.abort("the child aborts"),
                    group.close,
                )
            )

        def work(group):
            group.allreduce(np.ones(100_000))
            group.allreduce(np.ones(4), wait=False).wait()
            if group.rank == 0:
                *operations, abort, close = Child(lambda: calls(group)).result().splitlines()
                for raised in operations:
                    self.assertRegex(raised, "^Error: this process was forked from the one that made the group")
                self.assertEqual((abort, close), ("nothing", "nothing"))
            data = np.ones(100_000)
            group.allreduce(data)
            self.assertEqual(data.tolist(), [2.0] * 100_000)

        for transport in TRANSPORTS:
            with self.subTest(transport):
                threads(2, work, transport=transport)

    def test_forked_child_cannot_use_its_parents_stores(self):
        memory = evenkeel.MemoryStore()
        said = Child(lambda: outcome(lambda: evenkeel.init(memory, 0, 1, transport="shm"))).result()
        self.assertRegex(said, "^StoreError: this process was forked from the one that opened the store")
        with evenkeel.StoreServer() as server:
            self.assertEqual(Child(lambda: outcome(server.close)).result(), "nothing")
            evenkeel.init(server.address, 0, 1, transport="shm").close()

    def test_forked_children_of_a_process_with_a_group_make_one_of_their_own(self):
        def work(address, rank, transport):
            with evenkeel.init(address, rank, 2, transport=transport, timeout=20) as group:
                data = np.full(100_000, rank + 1.0)
                group.allreduce(data)
                return data[0]

        for transport in TRANSPORTS:
            with self.subTest(transport), evenkeel.StoreServer() as server:
                with evenkeel.init(evenkeel.MemoryStore(), 0, 1, transport=transport) as group:
                    group.barrier()
                    children = [Child(lambda rank=rank: work(server.address, rank, transport)) for rank in range(2)]
                    self.assertEqual([child.result() for child in children], ["3.0", "3.0"])
                    group.barrier()

    def test_killed_rank_has_exited_although_its_forked_child_lives(self):
        program = (
            "import evenkeel, os, signal, sys\n"
            "group = evenkeel.init(sys.argv[1], 1, 2, transport=sys.argv[2])\n"
            "group.barrier()\n"
            "child = os.fork()\n"
            "if child == 0: signal.alarm(120); signal.pause()\n"
            "print(child, flush=True); signal.pause()"
        )
        for transport in TRANSPORTS:
            with self.subTest(transport), evenkeel.StoreServer() as server:
                command = [sys.executable, "-c", program, server.address, transport]
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
                    group = evenkeel.init(server.address, 0, 2, transport=transport, timeout=30)
                    group.barrier()
                    child = int(other.stdout.readline())
                    try:
                        other.kill()
                        with self.assertRaises(evenkeel.LostError) as caught:
                            group.barrier()
                        self.assertIn("its process has exited", str(caught.exception))
                        os.kill(child, 0)
                    finally:
                        os.kill(child, signal.SIGKILL)

    def test_started_program_inherits_nothing_of_a_group(self):
        def descriptors():
            """Those that a program gets without ``close_fds``."""
            command = [sys.executable, "-c", "import os; print(sorted(os.listdir('/proc/self/fd')))"]
            return subprocess.run(command, capture_output=True, text=True, check=True, close_fds=False).stdout

        def work(group):
            group.allreduce(np.ones(300_000))
            if group.rank == 0:
                self.assertGreater(len(os.listdir("/proc/self/fd")), opened + 3)
                self.assertEqual(descriptors(), before)
            group.barrier()

        before, opened = descriptors(), len(os.listdir("/proc/self/fd"))
        for transport in TRANSPORTS:
            with self.subTest(transport), evenkeel.StoreServer():
                threads(2, work, transport=transport)


if __name__ == "__main__":
    unittest.main()
