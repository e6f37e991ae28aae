"""Tests of operations and their errors."""

import array
import os
import signal
import subprocess
import sys
import threading
import time
import unittest
from unittest import mock

import numpy as np

import evenkeel
from ranks import run_threads, threads

TRANSPORTS = ("shm", "tcp:lo")


class Operations(unittest.TestCase):
    def test_reductions_of_all_types(self):
        kinds = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]

        def work(group):
            for kind in kinds:
                x = (np.arange(10) % 4 + group.rank).astype(kind)
                group.allreduce(x)
                np.testing.assert_array_equal(x, (np.arange(10) % 4 * 3 + 3).astype(kind))
            for op, wanted in [("sum", 6), ("prod", 6), ("min", 1), ("max", 3)]:
                x = np.full((2, 3), group.rank + 1, np.float64)
                group.allreduce(x, op)
                assert (x == wanted).all(), (op, x)

        for transport in TRANSPORTS:
            threads(3, work, transport)

    def test_bitwise_reductions(self):
        def work(group):
            for op, wanted in [("band", 0b1000), ("bor", 0b1111), ("bxor", 0b1111)]:
                x = np.full(5, 0b1000 | 1 << group.rank, np.int16)
                group.allreduce(x, op)
                assert (x == wanted).all(), (op, x)

        threads(3, work)

    def test_requests_overlap_and_keep_their_order(self):
        def work(group):
            me, size = group.rank, group.size
            arrays = [np.full(1 + 1000 * i, me + i) for i in range(20)]
            requests = [group.allreduce(x, wait=False) for x in arrays]
            # Receives before sends, on all ranks.
            got = np.zeros(300_000)
            receive = group.recv(got, (me - 1) % size, wait=False)
            send = group.send(np.full(300_000, float(me)), (me + 1) % size, wait=False)
            done = threading.Event()
            requests[-1].add_done_callback(lambda request: done.set())
            # A call that waits has its turn after those that were started.
            last = np.array([1])
            group.allreduce(last)
            assert last[0] == size and all(request.test() for request in requests)
            for i, (x, request) in enumerate(zip(arrays, requests, strict=True)):
                assert request.wait(20) is None
                assert (x == sum(range(size)) + size * i).all()
            assert receive.wait(20) == ((me - 1) % size, 300_000) and send.wait(20) is None
            assert (got == (me - 1) % size).all()
            assert done.wait(20)

        for transport in TRANSPORTS:
            threads(3, work, transport)

    def test_request_reports_errors_and_is_cancelled(self):
        def work(group):
            never = np.zeros(1)
            request = group.recv(never, 1 - group.rank, tag=7, wait=False)
            with self.assertRaises(evenkeel.TimeoutError):
                request.wait(0.01)
            assert not request.test()
            if group.rank == 0:
                assert request.cancel()
            with self.assertRaises(evenkeel.AbortedError):
                request.wait(20)
            assert request.test() and not request.cancel()

        threads(2, work)

    def test_reductions_of_types_without_a_numpy_type(self):
        def work(group):
            # 1 + 2 + 4 in bfloat16 and in fp8 (E4M3).
            x = np.array([[0x3F80, 0x4000, 0x4080][group.rank]], np.uint16)
            group.allreduce(x, dtype="bfloat16")
            assert x[0] == 0x40E0, hex(x[0])
            x = np.array([[0x38, 0x40, 0x48][group.rank]], np.uint8)
            group.allreduce(x, dtype="float8_e4m3fn")
            assert x[0] == 0x4E, hex(x[0])

        threads(3, work)

    def test_allreduce_algorithms(self):
        def work(group):
            for name in ["ring", "ring_chunked", "halving_doubling", "recursive_doubling", "bcube", "direct"]:
                x = np.arange(100_003, dtype=np.float32) % 1000 + group.rank
                group.allreduce(x, algorithm=name)
                np.testing.assert_array_equal(x, np.arange(100_003, dtype=np.float32) % 1000 * 3 + 3)

        for transport in TRANSPORTS:
            threads(3, work, transport)

    def test_link_rates_do_not_change_the_bits(self):
        def work(group):
            results = []
            for rate in [[7, 7, 7], [7, 7, 5], [7, 1, 1], [0, 7, 7]]:
                group.set_link_rate(rate[group.rank])
                x = (np.arange(100_003) % 977).astype(np.float32) / (3 + group.rank)
                group.allreduce(x, algorithm="direct")
                results.append(x.tobytes())
            assert len(set(results)) == 1
            with self.assertRaises(OverflowError):
                group.set_link_rate(-1)

        threads(3, work)

    def test_collectives_without_reduction(self):
        def work(group):
            me, size = group.rank, group.size
            x = np.full(5, me, np.int16)
            group.broadcast(x, root=2)
            assert (x == 2).all()

            x = np.zeros((size, 4), np.complex64)
            x[me] = me + 1j
            group.allgather(x)
            assert all((x[rank] == rank + 1j).all() for rank in range(size))
            x = np.array([9, 9, 9])
            if me > 0:
                x[me - 1 : 2 * me - 1] = me
            group.allgather(x, counts=[0, 1, 2])
            assert x.tolist() == [1, 2, 2], x

            got = np.zeros(6, np.int32) if me == 1 else None
            group.gather(np.array([me, -me], np.int32), got, root=1)
            assert got is None or got.tolist() == [0, 0, 1, -1, 2, -2]
            got = np.zeros(3, bool) if me == 0 else None
            group.gather(np.ones(me, bool), got, counts=[0, 1, 2])
            assert got is None or got.all()

            part = np.zeros(2)
            group.scatter(part, np.arange(6.0) if me == 0 else None)
            assert part.tolist() == [2 * me, 2 * me + 1]
            part = bytearray(me)
            group.scatter(part, b"abb" if me == 2 else None, root=2, counts=[0, 1, 2])
            assert part == [b"", b"a", b"bb"][me]

            out = np.zeros(3, np.int64)
            group.alltoall(np.arange(3) + 10 * me, out)
            assert out.tolist() == [me, 10 + me, 20 + me]
            out = np.zeros(3 * me, np.uint8)
            group.alltoall(np.full(3, me, np.uint8), out, sent=[0, 1, 2], received=[me] * 3)
            assert out.tolist() == sorted([0, 1, 2] * me)

            x = np.arange(6, dtype=np.int32) + me
            part = group.reduce_scatter(x)
            assert part == slice(2 * me, 2 * me + 2), part
            assert x[part].tolist() == [6 * me + 3, 6 * me + 6], (x, part)
            part = group.reduce_scatter(x := np.full(3, me), "max", counts=[1, 0, 2])
            assert (x[part] == 2).all() and part.stop - part.start == [1, 0, 2][me]
            x = np.array([2.0])
            group.reduce(x, "prod", root=1)
            assert me != 1 or x[0] == 8
            group.barrier()

        for transport in TRANSPORTS:
            threads(3, work, transport)

    def test_messages(self):
        def work(group):
            if group.rank == 0:
                x = np.zeros(4, np.int32)
                assert group.recv(x, 2, tag=7) == (2, 3) and x.tolist() == [1, 2, 3, 0]
                assert group.recv(x) == (1, 0)
            elif group.rank == 1:
                group.send(b"", 0)
            else:
                group.send(np.array([1, 2, 3], np.int32), 0, tag=7)
            group.barrier()

        threads(3, work)

    def test_sub_groups(self):
        def work(group):
            part = group.sub_group([2, 0])
            assert (part is None) == (group.rank == 1)
            if part is not None:
                assert (part.rank, part.size) == ([1, None, 0][group.rank], 2)
                part.allreduce(x := np.ones(3))
                assert (x == 2).all()
            assert group.split(None if group.rank == 0 else 5) is None or group.rank > 0
            assert "process" in group.describe(1) and group.timeout == 20.0 and group.failure is None
            assert repr(group) == f"<evenkeel.Group: rank {group.rank} of 3>"
            group.barrier()

        threads(3, work)

    def test_buffers_are_used_in_place(self):
        def work(group):
            for x in (array.array("f", [1, 2]), bytearray(b"\1\2"), memoryview(bytearray(b"\1\2")).cast("b")):
                group.allreduce(x)
                assert list(x) == [2, 4]
            x = np.zeros((4, 4), np.float32)
            group.allreduce(x[1:3])  # rows of an array are contiguous
            x += 1
            group.allreduce(x[2])
            assert x[:, 0].tolist() == [1, 1, 2, 1]
            group.allreduce(np.zeros((0, 3)))

        threads(2, work)

    def test_operations_release_the_interpreter(self):
        def work(group):
            if group.rank == 0:
                # The other thread must get the interpreter for this to end.
                group.recv(np.zeros(1), 1)
                group.send(np.zeros(1), 1)
            else:
                group.send(np.zeros(1), 0)
                group.recv(np.zeros(1), 0)
            done = []
            tags = [threading.Thread(target=lambda tag=tag: done.append(group.allreduce(np.ones(1000), tag=tag))) for tag in range(4)]
            for thread in tags if group.rank == 0 else reversed(tags):
                thread.start()
            for thread in tags:
                thread.join()
            assert len(done) == 4

        for transport in TRANSPORTS:
            threads(2, work, transport)


class Tensors(unittest.TestCase):
    """Objects with ``__dlpack__`` and without a buffer, such as torch's tensors."""

    class Tensor:
        def __init__(self, array, device=(1, 0), versions=True, requires_grad=False):
            self.array, self.device, self.versions, self.requires_grad = array, device, versions, requires_grad

        def __dlpack_device__(self):
            return self.device

        def __dlpack__(self, **options):
            if self.requires_grad:
                raise BufferError("can't export tensors that require gradient")
            if options and not self.versions:
                raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
            return self.array.__dlpack__(**options)

        def detach(self):
            return type(self)(self.array, self.device, self.versions)

    def test_dlpack_tensors_are_used_in_place(self):
        def work(group):
            for versions in (True, False):
                for requires_grad in (True, False):
                    for kind in (np.float16, np.float32, np.float64, np.int8, np.int32, np.int64, np.uint8, np.uint32, np.uint64):
                        x = np.ones((3, 4), kind)
                        group.allreduce(self.Tensor(x, versions=versions, requires_grad=requires_grad))
                        assert (x == 2).all()
                    group.broadcast(self.Tensor(x := np.full(3, group.rank, np.complex128), versions=versions))
                    assert (x == 0).all()
            group.allreduce(self.Tensor(np.zeros((0, 3))))

        threads(2, work)

    def test_unusable_tensors_are_errors(self):
        def work(group):
            rows = np.zeros((4, 4), np.float32)
            read_only = rows.copy()
            read_only.flags.writeable = False
            for wrong, says in [
                (self.Tensor(rows, (2, 0)), "CPU"),
                (self.Tensor(rows[:, 1]), "contiguous"),
                (self.Tensor(rows.T), "contiguous"),
                (self.Tensor(read_only), "cannot be written"),
                (self.Tensor(np.zeros(3, np.int16)), "cannot be reduced"),
            ]:
                with self.assertRaisesRegex((ValueError, TypeError), says):
                    group.allreduce(wrong)
            assert not rows.any()

        threads(1, work)


class InvalidArguments(unittest.TestCase):
    def test_invalid_arguments_leave_the_group_usable(self):
        def work(group):
            x = np.zeros(4, np.float32)
            for wrong in [
                lambda: group.allreduce(x, "mean"),
                lambda: group.allreduce(x, algorithm="guess"),
                lambda: group.allreduce(x, dtype="float31"),
                lambda: group.allreduce(np.zeros(3, np.uint8), dtype="float32"),
                lambda: group.allreduce(x[::2]),
                lambda: group.allreduce(np.zeros((3, 2), order="F")),
                lambda: group.allreduce(b"abcd"),
                lambda: group.allreduce(x, timeout=-1),
                lambda: group.allreduce(x, timeout=float("nan")),
                lambda: group.allgather(np.zeros(3)),
                lambda: group.allgather(x, counts=[1, 2**62]),
                lambda: group.broadcast(x, root=2),
                lambda: group.alltoall(x, x),
                lambda: group.alltoall(x[:2], x[1:3]),
                lambda: group.gather(x, x[1:]),
                lambda: group.send(x, group.rank),
                lambda: group.sub_group([0, 0]),
                lambda: evenkeel.init(store=5, rank=0, size=1),
                lambda: evenkeel.init(rank=0),
                lambda: evenkeel.init("http://x", 0, 1),
                lambda: evenkeel.init(evenkeel.MemoryStore(), 0, 1, transport="pigeon"),
            ]:
                with self.assertRaises(ValueError):
                    wrong()
            for wrong in [[1, 2], "text", np.zeros(3, bool), np.zeros(3, ">f4"), np.zeros(3, complex), object()]:
                with self.assertRaises(TypeError):
                    group.allreduce(wrong)
            assert not x.any()
            group.barrier()

        threads(2, work)

    def test_tls_errors_name_the_file(self):
        def init():
            return evenkeel.init(evenkeel.MemoryStore(), 0, 1, transport="tls:lo")

        files = {"EVENKEEL_TLS_CERT": "/nowhere.pem", "EVENKEEL_TLS_KEY": "/nowhere.key"}
        with mock.patch.dict(os.environ, files):
            with self.assertRaisesRegex(ValueError, "EVENKEEL_TLS_CA is not set"):
                init()
            os.environ["EVENKEEL_TLS_CA"] = "/nowhere"
            with self.assertRaisesRegex(ValueError, "/nowhere.pem"):
                init()

    def test_closed_group_raises(self):
        group = evenkeel.init(evenkeel.MemoryStore(), 0, 1)
        group.close()
        group.close()
        with self.assertRaisesRegex(ValueError, "closed"):
            group.barrier()
        self.assertEqual((group.rank, group.size), (0, 1))

    def test_missing_launcher_is_an_error(self):
        names = ("RANK", "WORLD_SIZE")
        with self.assertRaisesRegex(ValueError, "RANK and WORLD_SIZE"):
            self.assertFalse(any(name in os.environ for name in names))
            evenkeel.init()


class Failures(unittest.TestCase):
    def test_interface_of_gloo_is_used_where_nccls_is_not_set(self):
        program = "import evenkeel; evenkeel.init(evenkeel.MemoryStore(), 0, 1, transport='tcp').barrier()"
        for variables, wanted in (
            ({"GLOO_SOCKET_IFNAME": "lo"}, None),
            ({"GLOO_SOCKET_IFNAME": "nosuch0"}, "nosuch0"),
            ({"GLOO_SOCKET_IFNAME": "nosuch0", "NCCL_SOCKET_IFNAME": "nosuch1"}, "nosuch1"),
            ({"NCCL_SOCKET_IFNAME": "eth0,^lo"}, "NCCL_SOCKET_IFNAME"),
        ):
            with self.subTest(variables):
                ran = subprocess.run(
                    [sys.executable, "-c", program], env=os.environ | variables, capture_output=True, text=True, timeout=60
                )
                if wanted is None:
                    self.assertEqual((ran.returncode, ran.stderr), (0, ""))
                else:
                    self.assertNotEqual(ran.returncode, 0)
                    self.assertIn(wanted, ran.stderr.splitlines()[-1])

    def test_process_listens_at_the_ports_that_are_set(self):
        program = (
            "import evenkeel, os, sys\n"
            "group = evenkeel.init(evenkeel.MemoryStore(), 0, 1, transport=sys.argv[1])\n"
            "sockets = {os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{fd}')}\n"
            "for name in ('tcp', 'tcp6'):\n"
            "    for row in open(f'/proc/net/{name}').readlines()[1:]:\n"
            "        _, local, _, state, *_, = row.split()\n"
            "        if state == '0A' and f'socket:[{row.split()[9]}]' in sockets: print(int(local.rpartition(':')[2], 16))\n"
        )
        ports = range(29_880, 29_900)
        for transport, listeners in (("shm", 1), ("tcp:lo", 2)):
            with self.subTest(transport):
                variables = os.environ | {"EVENKEEL_PORTS": f"{ports[0]}-{ports[-1]}"}
                command = [sys.executable, "-c", program, transport]
                ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=True)
                taken = [int(port) for port in ran.stdout.split()]
                self.assertEqual((len(taken), [port for port in taken if port not in ports]), (listeners, []))

    def test_timeout_names_ranks_that_do_not_join(self):
        with self.assertRaises(evenkeel.TimeoutError) as caught:
            evenkeel.init(evenkeel.MemoryStore(), 0, 3, transport="shm", timeout=0.3)
        self.assertEqual(caught.exception.ranks, (1, 2))
        self.assertIsInstance(caught.exception, TimeoutError)
        self.assertIn("ranks 1 and 2", str(caught.exception))

    def test_group_stays_usable_after_timeout(self):
        def work(group):
            if group.rank == 0:
                with self.assertRaises(evenkeel.TimeoutError) as caught:
                    group.recv(np.zeros(1), 1, timeout=0.3)
                self.assertTrue(caught.exception.group_usable)
                self.assertEqual(caught.exception.ranks, (1,))
            group.barrier()

        threads(2, work)

    def test_timeout_ends_also_the_wait_for_an_operation_before(self):
        def work(group):
            if group.rank == 0:
                begun = group.barrier(wait=False)
                with self.assertRaises(evenkeel.TimeoutError) as caught:
                    group.barrier(timeout=0.2)
                self.assertIn("has not ended", str(caught.exception))
                group.send(bytes(1), 1, tag=7)
                begun.wait()
            else:
                # It joins the first barrier only when the other rank has given up the second.
                group.recv(bytearray(1), 0, tag=7)
                group.barrier()
                with self.assertRaises(evenkeel.TimeoutError):
                    group.barrier(timeout=0.2)
            group.barrier()

        threads(2, work)

    def test_abort_ends_the_group_on_all_ranks(self):
        def work(group):
            if group.rank == 0:
                group.recv(np.zeros(1), 1)
                group.abort("the disk is full")
            else:
                with self.assertRaisesRegex(evenkeel.AbortedError, "the disk is full") as caught:
                    group.send(np.zeros(1), 0)
                    group.recv(np.zeros(1), 0)
                self.assertFalse(caught.exception.group_usable)
                self.assertIsInstance(group.failure, evenkeel.AbortedError)

        threads(2, work)

    def test_different_counts_are_a_mismatch(self):
        def work(group):
            with self.assertRaises(evenkeel.MismatchError):
                group.allreduce(np.zeros(3 + group.rank))

        threads(2, work)

    def test_different_lengths_of_an_all_to_all_are_a_mismatch_on_all_ranks(self):
        def work(group):
            sent, received = [1] * group.size, [1] * group.size
            if group.rank == 0:
                received[1] = 3
            text = "rank 1 .*it sent 8 bytes where 24 were expected"
            with self.assertRaisesRegex(evenkeel.MismatchError, text):
                group.alltoall(np.ones(sum(sent)), np.zeros(sum(received)), sent=sent, received=received)
                # What the others were sent was right: they get the error of the first rank with their next call.
                group.barrier()

        for transport in TRANSPORTS:
            with self.subTest(transport):
                threads(3, work, transport)

    def test_killed_rank_is_lost(self):
        program = (
            "import evenkeel, numpy, sys\n"
            "group = evenkeel.init(sys.argv[1], 1, 2, transport='tcp:lo')\n"
            "group.barrier(); print('there', flush=True); group.recv(numpy.zeros(1), 0)"
        )
        with evenkeel.StoreServer() as store:
            with subprocess.Popen([sys.executable, "-c", program, store.address], stdout=subprocess.PIPE) as other:
                try:
                    group = evenkeel.init(store.address, 0, 2, transport="tcp:lo")
                    group.barrier()
                    other.stdout.readline()
                    other.send_signal(signal.SIGKILL)
                    begun = time.monotonic()
                    with self.assertRaises(evenkeel.LostError) as caught:
                        group.allreduce(np.zeros(10))
                    self.assertLess(time.monotonic() - begun, 30)
                    self.assertEqual((caught.exception.ranks, caught.exception.group_usable), ((1,), False))
                finally:
                    other.kill()

    def test_receive_from_any_rank_goes_on_without_those_that_have_exited(self):
        program = (
            "import evenkeel, numpy, sys, time\n"
            "rank = int(sys.argv[2])\n"
            "group = evenkeel.init(sys.argv[1], rank, 3, transport=sys.argv[3])\n"
            # Past the time after which rank 0 asks whether the others are alive.
            "time.sleep(1 if rank == 2 else 0)\n"
            "group.send(numpy.full(1, rank), 0); group.close()"
        )
        for transport in TRANSPORTS:
            with self.subTest(transport), evenkeel.StoreServer() as store:
                others = [
                    subprocess.Popen([sys.executable, "-c", program, store.address, str(rank), transport]) for rank in (1, 2)
                ]
                try:
                    with evenkeel.init(store.address, 0, 3, transport=transport, timeout=20) as group:
                        self.assertEqual(others[0].wait(60), 0)
                        got = np.zeros(1, dtype=np.int64)
                        for rank in (1, 2):
                            self.assertEqual(group.recv(got), (rank, 1))
                            self.assertEqual(got[0], rank)
                        self.assertEqual(others[1].wait(60), 0)
                        with self.assertRaises(evenkeel.LostError) as caught:
                            group.recv(got)
                        self.assertEqual(caught.exception.ranks, (1, 2))
                finally:
                    for other in others:
                        other.kill()
                        other.wait()

    def test_reconfigure_goes_on_without_lost_ranks_and_with_newcomers(self):
        store = evenkeel.MemoryStore()
        lost, alone = threading.Barrier(3), threading.Barrier(3)

        def work(rank):
            group = evenkeel.init(store, rank, 3, transport="shm", timeout=20)
            if rank == 0:
                group.close()
                lost.wait()
                alone.wait()
                group = evenkeel.join_as_newcomer(store, transport="shm", timeout=20)
                self.assertEqual((group.rank, group.size, group.previous_ranks), (2, 3, [None] * 3))
            else:
                lost.wait()
                with self.assertRaises(evenkeel.LostError) as caught:
                    group.barrier()
                self.assertEqual(caught.exception.ranks, (0,))
                group = group.reconfigure()
                self.assertEqual((group.rank, group.previous_ranks), (rank - 1, [1, 2]))
                group.barrier()
                alone.wait()
                group = group.reconfigure(min_size=3)
                self.assertEqual(group.previous_ranks, [0, 1, None])
            x = np.full(5, group.rank + 1)
            group.allreduce(x)
            self.assertTrue((x == 6).all())
            if group.rank == 0:
                # The others are alive and do not call it.
                with self.assertRaises(evenkeel.TimeoutError) as caught:
                    group.reconfigure(timeout=0.3)
                self.assertEqual(caught.exception.ranks, (1, 2))
            lost.wait()
            group.close()

        run_threads(3, work)


if __name__ == "__main__":
    unittest.main()
