"""Tests of the backend ``evenkeel`` of torch.distributed, beside Gloo where both must give the same."""

import os
import signal
import time
import unittest
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import evenkeel
import evenkeel.torch
from ranks import TIMEOUT, processes

BACKENDS = ("evenkeel", "cpu:evenkeel")


def everywhere(size, work):
    """Runs the work as the only backend, and as the backend of a device."""
    for backend in BACKENDS:
        processes(size, work, backend)


class Collectives(unittest.TestCase):
    def test_reductions_of_all_types_and_operations(self):
        def work(rank, size):
            for dtype in evenkeel.torch._DTYPES:
                if "float8" in str(dtype):
                    continue
                x = torch.tensor([1, 2, rank + 1]).to(dtype)
                dist.all_reduce(x)
                assert x.to(torch.int64).tolist() == [3, 6, 6], (dtype, x)
            for op, wanted in [("SUM", 6), ("PRODUCT", 6), ("MIN", 1), ("MAX", 3), ("BAND", 0), ("BOR", 3), ("BXOR", 0)]:
                x = torch.full((3, 2), rank + 1)
                dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
                assert (x == wanted).all(), (op, x)
            x = torch.full((5,), float(rank))
            dist.all_reduce(x, op=dist.ReduceOp.AVG)
            assert (x == 1).all()
            for op, wanted in [("SUM", True), ("MAX", True), ("MIN", False), ("PRODUCT", False)]:
                x = torch.tensor([rank == 1])
                dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
                assert x.item() is wanted, op
            x = torch.full((2,), complex(rank, 1))
            dist.all_reduce(x)
            assert (x == complex(3, 3)).all()
            x = torch.full((4,), rank + 1)
            dist.reduce(x, 1)
            assert (x == (6 if rank == 1 else rank + 1)).all()

        everywhere(3, work)

    def test_tensors_that_are_not_contiguous_are_used_in_their_place(self):
        def work(rank, size):
            whole = torch.zeros(4, 6)
            whole[:, ::2] = rank + 1
            dist.all_reduce(whole[:, ::2])
            assert (whole[:, ::2] == 3).all() and (whole[:, 1::2] == 0).all()
            turned = torch.full((3, 5), float(rank)).t()
            dist.broadcast(turned, 1)
            assert (turned == 1).all()

        everywhere(2, work)

    def test_tensors_of_inference_mode_and_channels_last_are_gathered_by_index(self):
        def work(rank, size):
            image = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5) + 1000 * rank
            with torch.inference_mode():
                for own in (image, image.to(memory_format=torch.channels_last)):
                    outs = [torch.empty_like(image) for _ in range(size)]
                    dist.all_gather(outs, own)
                    for other, out in enumerate(outs):
                        assert torch.equal(out, image + 1000 * (other - rank))
            total = torch.zeros(3)
            dist.all_reduce(total)
            assert total.sum() == 0

        everywhere(2, work)

    def test_tensors_without_elements_move_and_the_group_goes_on(self):
        def work(rank, size):
            none = torch.zeros(0)
            for call in (
                lambda: dist.all_reduce(none),
                lambda: dist.broadcast(none, 0),
                lambda: dist.all_gather([torch.zeros(0) for _ in range(size)], none),
                lambda: dist.all_to_all_single(torch.zeros(0), none),
                lambda: dist.reduce_scatter_tensor(torch.zeros(0), none),
            ):
                call()
            counts = [rank * other for other in range(size)]
            parts = torch.zeros(sum(counts))
            dist.all_to_all_single(parts, torch.full((sum(counts),), 1.0), counts, counts)
            assert (parts == 1).all()

        everywhere(3, work)

    def test_moves_equal_and_unequal_parts(self):
        def work(rank, size):
            parts = [torch.zeros(2, 2) for _ in range(size)]
            dist.all_gather(parts, torch.full((2, 2), float(rank)))
            assert [int(part[0, 0]) for part in parts] == list(range(size))
            whole = torch.zeros(2 * size)
            dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
            assert whole.tolist() == [0, 0, 1, 1, 2, 2]
            part = torch.zeros(2)
            dist.reduce_scatter_tensor(part, torch.arange(2.0 * size))
            assert part.tolist() == [6 * rank, 6 * rank + 3]
            part = torch.zeros(rank + 1)
            dist.reduce_scatter(part, [torch.full((r + 1,), float(r)) for r in range(size)])
            assert part.tolist() == [3 * rank] * (rank + 1)
            parts = [torch.zeros(2) for _ in range(size)] if rank == 2 else None
            dist.gather(torch.full((2,), float(rank)), parts, 2)
            assert parts is None or [int(part[1]) for part in parts] == [0, 1, 2]
            dist.scatter(part := torch.zeros(3), [torch.full((3,), float(r)) for r in range(size)] if rank == 0 else None, 0)
            assert (part == rank).all()
            # Rank r sends r + i rows to rank i.
            sent, received = [rank + i for i in range(size)], [i + rank for i in range(size)]
            source, target = torch.full((sum(sent), 2), rank), torch.zeros((sum(received), 2), dtype=torch.int64)
            dist.all_to_all_single(target, source, received, sent)
            assert target[:, 0].tolist() == [i for i in range(size) for _ in range(i + rank)]
            outputs = [torch.zeros(i + 1) for i in range(size)]
            dist.all_to_all(outputs, [torch.full((rank + 1,), float(rank)) for _ in range(size)])
            assert all((output == i).all() for i, output in enumerate(outputs))
            objects = [None] * size
            dist.all_gather_object(objects, {"rank": rank})
            assert [entry["rank"] for entry in objects] == [0, 1, 2]

        everywhere(3, work)

    def test_sparse_allreduce_adds_what_has_the_same_index(self):
        def work(rank, size):
            x = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 5.0], (4,))
            dist.all_reduce(x)
            assert x.to_dense().tolist() == [2, 5, 5, 0]

        everywhere(2, work)

    def test_asynchronous_works_have_futures(self):
        def work(rank, size):
            tensors = [torch.full((1000 * i + 1,), float(rank + i)) for i in range(10)]
            works = [dist.all_reduce(x, async_op=True) for x in tensors]
            doubled = works[3].get_future().then(lambda future: future.value()[0] * 2)
            for i, (x, done) in enumerate(zip(tensors, works, strict=True)):
                done.wait()
                assert (x == 3 + 3 * i).all()
            assert (doubled.wait() == 24).all()
            assert isinstance(works[0], evenkeel.torch.Work) and works[0].is_completed() and works[0].is_success()

        processes(3, work)

    def test_callback_of_a_future_may_wait_for_another_operation(self):
        """As the hook of DistributedDataParallel with PowerSGD does."""

        def work(rank, size):
            first, second = torch.ones(1000), torch.full((1000,), float(rank))

            def then(future):
                dist.all_reduce(second, async_op=True).get_future().wait()
                third = future.value()[0].clone()
                dist.all_reduce(third)
                return third

            chained = dist.all_reduce(first, async_op=True).get_future().then(then)
            assert (chained.wait() == size * size).all() and (second == 3).all()

        everywhere(3, work)

    def test_result_is_in_the_tensors_once_a_work_says_that_it_is_done(self):
        def work(rank, size):
            parts = [torch.zeros(1000) for _ in range(size)]
            average, turned = torch.full((1000,), float(rank)), torch.full((10, 100), float(rank)).t()
            for done in [
                dist.all_gather(parts, torch.full((1000,), float(rank)), async_op=True),
                dist.all_reduce(average, op=dist.ReduceOp.AVG, async_op=True),
                dist.all_reduce(turned, async_op=True),
            ]:
                end = time.monotonic() + TIMEOUT.total_seconds()
                while not done.is_completed():
                    assert time.monotonic() < end
                assert done.is_success()
            assert all((part == i).all() for i, part in enumerate(parts))
            assert (average == 1).all() and (turned == 3).all()

        processes(3, work)

    def test_operations_are_not_recorded_for_a_backward_pass(self):
        def work(rank, size):
            features = torch.full((4,), float(rank), requires_grad=True)
            parts = [torch.zeros(4) for _ in range(size)]
            dist.all_gather(parts, features)
            assert all((part == i).all() and not part.requires_grad for i, part in enumerate(parts))
            whole, own = torch.zeros(4 * size), torch.zeros(4)
            dist.all_gather_into_tensor(whole, features)
            dist.reduce_scatter_tensor(own, torch.cat([features] * size))
            assert not whole.requires_grad and not own.requires_grad and (own == 1).all()
            # Each rank's gradient is that of its own loss.
            loss = (features * 3).sum()
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
            loss.backward()
            assert loss.item() == 6 and (features.grad == 3).all(), (loss, features.grad)
            dist.all_reduce(features)

        everywhere(2, work)

    def test_sum_with_a_factor(self):
        def work(rank, size):
            x = torch.full((5,), float(rank + 1))
            dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
            assert (x == 1.5).all(), x
            whole = torch.ones(1, dtype=torch.int16)
            try:
                dist.all_reduce(whole, op=dist._make_nccl_premul_sum(3))
            except evenkeel.torch.ArgumentError:
                assert whole.item() == 1
            else:
                raise AssertionError("integers cannot be multiplied by a factor")

        processes(2, work)

    def test_what_cannot_be_done_is_refused_by_name(self):
        def work(rank, size):
            for wrong, text in [
                (lambda: dist.all_reduce(torch.zeros(1, dtype=torch.float8_e4m3fnuz)), "cannot reduce tensors of torch.float8_e4m3fnuz"),
                (lambda: dist.all_reduce(torch.zeros(1), op=dist.ReduceOp.BAND), "needs integers"),
                (lambda: dist.all_reduce(torch.zeros(1, device="meta")), "on the CPU"),
            ]:
                try:
                    wrong()
                except evenkeel.torch.ArgumentError as error:
                    assert text in str(error), error
                else:
                    raise AssertionError(text)

        processes(1, work)

    def test_averages_of_large_numbers_stay_in_range(self):
        def work(rank, size):
            for dtype, large in [(torch.float16, 40_000), (torch.bfloat16, 3e38), (torch.float8_e5m2, 40_000)]:
                x = torch.full((4,), large, dtype=dtype)
                dist.all_reduce(x, op=dist.ReduceOp.AVG)
                assert (x.double() == torch.full((4,), large, dtype=dtype).double()).all(), x
            large = torch.full((4,), 40_000, dtype=torch.float16)
            part, whole = torch.zeros_like(large[:2]), large.clone()
            dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG)
            assert (part == 40_000).all() and (whole == 40_000).all(), (part, whole)
            dist.reduce(whole, 1, op=dist.ReduceOp.AVG)
            assert (whole == 40_000).all(), whole

        everywhere(2, work)

    def test_short_integers_are_reduced_with_their_own_wrap_around(self):
        def work(rank, size):
            for dtype in (torch.int16, torch.uint16):
                for op, wanted in [("SUM", 6), ("PRODUCT", 6), ("MIN", 1), ("MAX", 3), ("BOR", 3), ("AVG", 2)]:
                    x = torch.full((3, 2), rank + 1).to(dtype)
                    dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
                    assert x.dtype == dtype and x.to(torch.int64).tolist() == [[wanted] * 2] * 3, (dtype, op, x)
            x = torch.full((2,), 20_000, dtype=torch.int16)
            dist.all_reduce(x)
            assert (x == 60_000 - 65_536).all(), x
            x = torch.full((6,), rank - 2, dtype=torch.int16)
            part = torch.zeros(2, dtype=torch.int16)
            dist.reduce_scatter_tensor(part, x)
            assert (part == -3).all() and (x == rank - 2).all(), (part, x)
            dist.reduce(x, 1)
            assert (x == (-3 if rank == 1 else rank - 2)).all(), x

        everywhere(3, work)

    def test_conjugated_and_negated_views_are_sent_as_their_values(self):
        """Of conjugated tensors, torch hands those of a gather to the backend, and refuses the others itself."""

        def work(rank, size):
            own = [torch.tensor([1 + 2j, 3 - 4j]) * (r + 1) for r in range(size)]
            wanted = [z.conj_physical() for z in own]
            view = own[rank].conj()
            assert view.is_conj()
            parts = [torch.zeros(2, dtype=torch.complex64) for _ in range(size)]
            dist.gather(view, parts if rank == 0 else None, 0)
            if rank == 0:
                assert all(map(torch.equal, parts, wanted)), parts
            for operation, sums in [(dist.all_reduce, [-6, 12]), (lambda x: dist.broadcast(x, 1), [-4, 8])]:
                negated = own[rank].clone().conj().imag
                assert negated.is_neg()
                operation(negated)
                assert negated.tolist() == sums, negated

        everywhere(2, work)


class Messages(unittest.TestCase):
    def test_messages_to_oneself_meet_by_tag_and_in_order(self):
        def work(rank, size):
            # An exchange by hand, with the rank's own part in it.
            got = [torch.zeros(2) for _ in range(size)]
            ops = []
            for peer in range(size):
                ops.append(dist.P2POp(dist.isend, torch.full((2,), 10.0 * rank + peer), peer))
                ops.append(dist.P2POp(dist.irecv, got[peer], peer))
            for done in dist.batch_isend_irecv(ops):
                done.wait()
            assert [part.tolist() for part in got] == [[10.0 * r + rank] * 2 for r in range(size)], got

            # Receives first, in the other order of tags, into a view that is not contiguous and a longer tensor.
            strided, longer = torch.zeros(2, 4)[:, ::2], torch.zeros(3)
            second, first = dist.irecv(strided, rank, tag=2), dist.irecv(longer, rank, tag=1)
            assert not first.is_completed()
            dist.isend(torch.tensor([5.0, 6.0]), rank, tag=1).wait()
            dist.isend(torch.full((2, 2), 7.0), rank, tag=2).wait()
            first.wait()
            second.wait()
            assert longer.tolist() == [5, 6, 0] and (strided == 7).all(), (longer, strided)

            sent, received = dist.isend(torch.ones(4), rank), dist.irecv(torch.zeros(2), rank)
            for work in (sent, received):
                try:
                    work.wait()
                except evenkeel.MismatchError as error:
                    assert "16 bytes, and the tensor 8" in str(error), error
                else:
                    raise AssertionError("the tensor is too short")
            try:
                dist.irecv(torch.zeros(2), rank).wait(timedelta(milliseconds=10))
            except evenkeel.TimeoutError as error:
                assert "receive of tag 0 from this rank itself" in str(error), error
            else:
                raise AssertionError("nobody has sent a message")

        everywhere(2, work)

    def test_copy_that_fails_fails_in_each_wait(self):
        def work(rank, size):
            target = torch.zeros(2, 3)

            def finish():
                target.copy_(torch.zeros(5))

            done = evenkeel.torch.Work([target], [], None)
            done._finish = finish
            for _ in range(2):
                try:
                    done.wait()
                except RuntimeError as error:
                    assert "size" in str(error), error
                else:
                    raise AssertionError("the tensors have different sizes")

        processes(1, work)

    def test_messages_cross_and_any_source_is_named(self):
        def work(rank, size):
            right, left = (rank + 1) % size, (rank - 1) % size
            got = torch.zeros(100_000)
            ops = [dist.P2POp(dist.irecv, got, left), dist.P2POp(dist.isend, torch.full((100_000,), float(rank)), right)]
            for done in dist.batch_isend_irecv(ops):
                done.wait()
            assert (got == left).all()
            if rank == 0:
                sources = set()
                for _ in range(size - 1):
                    sources.add(dist.recv(got, tag=3))
                assert sources == {1, 2}
            else:
                dist.send(torch.zeros(100_000), 0, tag=3)
            # A process that exits while another one receives from any rank counts as lost.
            dist.barrier()

        processes(3, work)


class Groups(unittest.TestCase):
    def test_sub_groups_and_a_group_made_again(self):
        def work(rank, size):
            groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
            for group, members in zip(groups, ([0, 1], [1, 2]), strict=True):
                if rank in members:
                    x = torch.tensor([rank])
                    dist.all_reduce(x, group=group)
                    assert x.item() == sum(members)
            store = dist.distributed_c10d._get_default_store()
            dist.destroy_process_group()
            dist.init_process_group("evenkeel", store=dist.PrefixStore("again", store), rank=size - 1 - rank, world_size=size)
            x = torch.tensor([dist.get_rank()])
            dist.broadcast(x, 0)
            assert x.item() == 0

        processes(3, work)

    def test_abort_ends_operations_on_all_ranks(self):
        def work(rank, size):
            token = torch.zeros(1)
            if rank == 1:
                # The others are in their operations, or about to be.
                for other in (0, 2):
                    dist.recv(token, other)
                dist.group.WORLD.abort()
            else:
                dist.send(token, 1)
            try:
                dist.all_reduce(token)
            except evenkeel.AbortedError as error:
                assert not error.group_usable and "torch.distributed aborted" in str(error), error
            else:
                raise AssertionError("the all-reduce went on")

        everywhere(3, work)

    @unittest.skipUnless(hasattr(dist.ProcessGroup, "set_timeout"), "this torch has no set_timeout")
    def test_timeout_that_is_set_later_holds_for_calls_that_follow(self):
        def work(rank, size):
            token = torch.zeros(1)
            dist.all_reduce(token)
            dist.group.WORLD.set_timeout(timedelta(seconds=0.2))
            if rank == 0:
                for call in (
                    lambda: dist.recv(token, 1, tag=7),
                    lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, token, 0)])[0].wait(),
                    lambda: dist.all_reduce(token),
                ):
                    with self.assertRaises(evenkeel.TimeoutError):
                        call()
                dist.group.WORLD.set_timeout(TIMEOUT)
                dist.send(token, 1)
            else:
                # Until the first rank has waited in vain, longer than the timeout.
                dist.group.WORLD.set_timeout(TIMEOUT)
                dist.recv(token, 0)

        everywhere(2, work)

    def test_rank_that_is_killed_is_named_on_all_others(self):
        def work(rank, size):
            dist.all_reduce(torch.zeros(1))
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                while True:
                    dist.all_reduce(torch.zeros(1000))
            except evenkeel.LostError as error:
                assert isinstance(error, RuntimeError)
                return list(error.ranks)

        # Long before torch's timeout for CPUs, which is half an hour.
        named = processes(4, work, timeout=timedelta(minutes=30), killed=[1])
        assert named == {0: [1], 2: [1], 3: [1]}, named

    def test_killed_rank_is_named_long_before_the_timeout(self):
        """Also where no bytes have come from it, so that no connection breaks."""
        timeout = timedelta(seconds=60)

        def work(rank, size):
            if rank == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            begun = time.monotonic()
            try:
                dist.recv(torch.zeros(1), 3)
            except evenkeel.LostError as error:
                return list(error.ranks), time.monotonic() - begun

        for named, seconds in processes(4, work, timeout=timeout, killed=[3]).values():
            assert named == [3] and seconds < timeout.total_seconds() / 4, (named, seconds)


@unittest.skipUnless(hasattr(dist, "_reconfigure"), "this torch has no _reconfigure")
class Reconfigure(unittest.TestCase):
    def test_process_takes_the_place_of_a_lost_one(self):
        def work(rank, size):
            store = dist.distributed_c10d._get_default_store()
            base = store
            while isinstance(base, dist.PrefixStore):
                base = base.underlying_store
            if rank == 1:
                # As a process that is started again.
                dist.destroy_process_group()
                dist.init_process_group(
                    "evenkeel", store=dist.PrefixStore("again", base), rank=rank, world_size=size, enable_reconfigure=True
                )
                try:
                    dist.all_reduce(torch.zeros(1))
                except RuntimeError as error:
                    assert "_reconfigure" in str(error), error
                else:
                    raise AssertionError("an operation of no group")
            else:
                try:
                    dist.all_reduce(torch.zeros(1))
                except evenkeel.LostError as error:
                    assert list(error.ranks) == [1], error
                else:
                    raise AssertionError("an operation without rank 1")
            assert dist._supports_reconfigure()
            # The ranks tell each other their handles by any means.
            base.set(f"handle/{rank}", dist._get_reconfigure_handle())
            handles = [base.get(f"handle/{other}").decode() for other in range(size)]
            for uuid, given in ((7, handles), (8, set(handles))):
                dist._reconfigure(uuid=uuid, handles=given, timeout=TIMEOUT).wait()
                x = torch.tensor([rank])
                dist.all_reduce(x)
                assert x.item() == 3 and (dist.get_rank(), dist.get_world_size()) == (rank, size)
            try:
                dist._reconfigure(uuid=9, handles=handles[:2])
            except ValueError as error:
                assert "number of ranks" in str(error), error
            else:
                raise AssertionError("a group of fewer ranks")

        for backend in BACKENDS:
            processes(3, work, backend)


class Training(unittest.TestCase):
    def test_ddp_gives_the_same_weights_as_gloo(self):
        def work(rank, size):
            torch.manual_seed(0)
            model = nn.parallel.DistributedDataParallel(
                nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3)), bucket_cap_mb=0.001
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            generator = torch.Generator().manual_seed(rank)
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(8, 20, generator=generator)).square().mean().backward()
                optimizer.step()
            return [weights.detach().tolist() for weights in model.parameters()]

        ours = [processes(2, work, backend) for backend in BACKENDS]
        gloo = processes(2, work, "gloo")
        for results in ours:
            assert results[0] == results[1]
            for weights, wanted in zip(results[0], gloo[0], strict=True):
                torch.testing.assert_close(torch.tensor(weights), torch.tensor(wanted))

    def test_fully_sharded_model_trains_as_one_process_does(self):
        from torch.distributed.fsdp import fully_shard

        def model():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

        def train(network):
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
            generator = torch.Generator().manual_seed(1)
            for _ in range(4):
                optimizer.zero_grad()
                network(torch.randn(8, 16, generator=generator)).square().mean().backward()
                optimizer.step()

        def work(rank, size):
            network = model()
            mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
            for layer in (network[0], network[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(network, mesh=mesh)
            train(network)
            # Not in the parent: some builds of torch cannot fork after a backward pass.
            alone = model()
            train(alone)
            for weights, wanted in zip(network.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(weights.full_tensor(), wanted)

        everywhere(2, work)


if __name__ == "__main__":
    unittest.main()
