"""The backend ``evenkeel`` of ``torch.distributed``, for tensors on the CPU.

::

    import evenkeel.torch  # not needed where torch finds backends by entry points
    import torch.distributed

    torch.distributed.init_process_group("evenkeel")  # or "cpu:evenkeel,cuda:nccl"

``EVENKEEL_TORCH_TRANSPORT`` selects how the ranks reach each other, as the ``transport`` argument of ``evenkeel.init``; by default
``auto``: shared memory within a host, TCP between hosts.
"""

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Backend, ProcessGroup, ReduceOp, Work as C10dWork

import evenkeel
from evenkeel._evenkeel import RawMemory, Request
from evenkeel import _torch_flight_recorder as recorder
from evenkeel._loopback import Loopback, LoopbackRequest

NAME = "evenkeel"
"""The backend's name."""

_OLDEST = "2.9"
"""The oldest torch that is tested. With 2.6, DistributedDataParallel waits for ever for works that are written in Python."""

if torch.__version__ < _OLDEST:
    raise ImportError(f"evenkeel.torch needs torch {_OLDEST} or later, and this is {torch.__version__}: use backend gloo, or a later torch")



def _constructible() -> bool:
    class Probe(Backend):
        pass

    try:
        Probe(0, 1)
    except TypeError:
        return False
    return True


_BESIDE_OTHERS = _constructible()
"""Whether this torch can have a backend from Python beside another one. Otherwise it can only be the whole process group."""

_OPS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "sum",
    ReduceOp.PREMUL_SUM: "sum",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}
_REDUCED = (
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    *(getattr(torch, name) for name in ("uint32", "uint64", "float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)),
)
_DTYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in _REDUCED}
_WIDER = {torch.int16: torch.int32, **({torch.uint16: torch.int32} if hasattr(torch, "uint16") else {})}
"""Types that are reduced as another one. The low bits of a sum or product do not depend on those above them."""
_LOCAL_OPS = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_BITWISE = ("band", "bor", "bxor")
_ON_BOOLS = {"sum": "bor", "max": "bor", "prod": "band", "min": "band"}


class ArgumentError(ValueError, RuntimeError):
    """An operation was called with tensors or options that do not fit together. Gloo's errors of this kind are `RuntimeError`."""


def _memory(tensor: Tensor) -> RawMemory:
    """The memory of a contiguous tensor."""
    return RawMemory(tensor.data_ptr(), tensor.nbytes, tensor.element_size(), tensor)


def _op(opts: Any) -> Any:
    """The reduction that was asked for."""
    return getattr(opts.reduceOp, "op", opts.reduceOp)


def _check(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ArgumentError(
                f"backend {NAME} works on tensors on the CPU, and this one is on {tensor.device}: "
                + (
                    f"use init_process_group('cpu:{NAME},{tensor.device.type}:nccl')"
                    if _BESIDE_OTHERS
                    else f"torch {torch.__version__} can have {NAME} as a group's only backend: use init_process_group('nccl'), "
                    f"and new_group(backend='{NAME}') for tensors on the CPU; torch 2.12 or later can have both in one group"
                )
            )
        if tensor.layout != torch.strided:
            raise ArgumentError(f"unsupported layout: this operation of backend {NAME} works on dense tensors, not {tensor.layout}")


def _listed(tensors: Any) -> list[Tensor]:
    """The tensors of a call that takes one, or a list of them."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _is_divided_first(dtype: torch.dtype) -> bool:
    """Whether an average divides before it sums, since the sum of many ranks may be more than the type can hold."""
    return (dtype.is_floating_point or dtype.is_complex) and torch.finfo(dtype).bits <= 16


def _single(tensors: Sequence[Tensor], what: str = "tensor list") -> Tensor:
    tensors = _listed(tensors)
    if len(tensors) != 1:
        raise ArgumentError(f"backend {NAME} requires a single-element {what} here, not one of {len(tensors)}")
    _check(tensors)
    return tensors[0]


def _check_alike(tensors: Sequence[Tensor], model: Tensor) -> None:
    """Refuses tensors that are not of the layout, type and number of elements of `model`."""
    for index, tensor in enumerate(tensors):
        if tensor.layout != model.layout:
            raise ArgumentError(f"invalid tensor layout at index {index}: {tensor.layout} beside {model.layout}")
        if tensor.dtype != model.dtype:
            raise ArgumentError(f"invalid tensor type at index {index}: {tensor.dtype} beside {model.dtype}")
        if tensor.numel() != model.numel():
            raise ArgumentError(f"invalid tensor size at index {index}: {tuple(tensor.shape)} beside {tuple(model.shape)}")


def _is_plain(tensor: Tensor) -> bool:
    """Whether the memory holds the elements in order, as it does not for a conjugated or lazily negated view."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _plain(tensor: Tensor) -> Tensor:
    """The elements in memory that holds them in order: the tensor's own memory if it does, otherwise a copy."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _plain_copy(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


class _Staged:
    """A tensor whose memory holds the elements in order, in the place of one that may not: the same if possible, otherwise a copy."""

    def __init__(self, tensor: Tensor, *, fill: bool = True, dtype: torch.dtype | None = None) -> None:
        self.target = tensor
        if dtype is not None:
            self.tensor = tensor.to(dtype).contiguous()
        elif _is_plain(tensor):
            self.tensor = tensor
        else:
            self.tensor = _plain(tensor) if fill else torch.empty(tensor.shape, dtype=tensor.dtype)

    def write_back(self) -> None:
        if self.tensor is not self.target:
            self.target.copy_(self.tensor)


class Work(C10dWork):
    """An operation in progress: a torch.distributed work with a future."""

    def __init__(
        self,
        tensors: list[Tensor] | list[list[Tensor]],
        requests: Sequence[Request | LoopbackRequest] = (),
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._tensors = tensors
        self._requests = requests
        self._finish = finish
        self._lock = threading.Lock()
        self._future: torch.futures.Future | None = None
        # The work may end in another thread, and the mode is of this one.
        self._inference = torch.is_inference_mode_enabled()
        if not requests:
            self._run_finish()

    def _run_finish(self) -> None:
        """What is left to do once the data are there, such as copies to the caller's tensors. Done until it succeeds once."""
        with self._lock:
            if self._finish is None:
                return
            with torch.inference_mode() if self._inference else torch.no_grad():
                self._finish()
            self._finish = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit = timeout.total_seconds() if timeout > timedelta(0) else None
        for request in self._requests:
            request.wait(limit)
        self._run_finish()
        return True

    def is_completed(self) -> bool:
        if not all(request.test() for request in self._requests):
            return False
        if self.exception() is None:
            # Who sees that it is done reads the tensors.
            self._run_finish()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        for request in self._requests:
            if request.test():
                try:
                    request.wait()
                except Exception as error:  # noqa: BLE001 - the caller asks for it
                    return error
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor] | list[list[Tensor]]:
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        return self._source_rank()

    def _source_rank(self) -> int:
        return self._requests[0].wait()[0]

    def get_future(self) -> torch.futures.Future:
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future()
        left = len(self._requests)

        def done(_request: Request | LoopbackRequest) -> None:
            nonlocal left
            with self._lock:
                left -= 1
                if left > 0:
                    return
            self._complete(future)

        if left == 0:
            self._complete(future)
        for request in self._requests:
            request.add_done_callback(done)
        return future

    def _complete(self, future: torch.futures.Future) -> None:
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - the future reports it
            future.set_exception(error)
        else:
            future.set_result(self._tensors)


def _without_autograd(kind: type) -> type:
    """Lets no operation of the class be recorded for a backward pass, as with torch's own backends."""
    for name, operation in list(vars(kind).items()):
        if callable(operation) and not name.startswith("__"):
            setattr(kind, name, torch.no_grad()(operation))
    return kind


@_without_autograd
class Operations:
    """The operations of torch.distributed, by a group. `_rank` and `_size` are the group's."""

    _group: evenkeel.Group
    _loopback: Loopback
    _rank: int
    _size: int
    _limit: float | None = None
    """The seconds of calls that have no timeout of their own; `None` for those with which the group was made."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of calls that follow and have none of their own."""
        self._limit = timeout.total_seconds()
        self._loopback.set_timeout(self._limit)

    def _seconds(self, opts: Any) -> float | None:
        return opts.timeout.total_seconds() if opts.timeout > timedelta(0) else self._limit

    def _work(
        self,
        opts: Any,
        tensors: list[Tensor],
        start: Callable[[bool, float | None], Any],
        finish: Callable[[], None] | None = None,
    ) -> Work:
        """Runs or starts an operation: `start` gets whether to wait, and the timeout."""
        timeout = self._seconds(opts)
        if getattr(opts, "asyncOp", True):
            return Work(tensors, [start(False, timeout)], finish)
        start(True, timeout)
        return Work(tensors, (), finish)

    # Reductions

    def _reducible(self, tensor: Tensor, opts: Any) -> tuple[Tensor, str, str | None]:
        """A tensor as one that can be reduced, in the same memory; the operation; the type."""
        kind = _op(opts)
        if kind not in _OPS:
            raise ArgumentError(f"backend {NAME} has no reduction {kind}")
        op = _OPS[kind]
        if tensor.dtype == torch.bool and kind != ReduceOp.PREMUL_SUM:
            return tensor.view(torch.uint8), _ON_BOOLS.get(op, op), None
        if op in _BITWISE:
            if tensor.is_floating_point() or tensor.is_complex():
                raise ArgumentError(f"{kind} needs integers, not {tensor.dtype}")
            return tensor, op, None
        if tensor.is_complex() and op == "sum":
            tensor = torch.view_as_real(tensor)
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise ArgumentError(f"backend {NAME} cannot reduce tensors of {tensor.dtype} with {kind}")
        if kind == ReduceOp.PREMUL_SUM:
            if not tensor.is_floating_point():
                raise ArgumentError(f"{kind} needs floating-point numbers, not {tensor.dtype}")
            tensor.mul_(opts.reduceOp.factor)
        elif kind == ReduceOp.AVG and _is_divided_first(tensor.dtype):
            if tensor.element_size() > 1:
                tensor.div_(self._size)
            else:  # torch cannot divide float8
                tensor.copy_(tensor.float().div_(self._size))
        return tensor, op, dtype

    def _average(self, tensor: Tensor, opts: Any) -> None:
        """Makes the average of the sum, unless the tensors were divided before."""
        if _op(opts) != ReduceOp.AVG or _is_divided_first(tensor.dtype):
            return
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.div_(self._size)
        else:
            tensor.copy_(torch.div(tensor, self._size, rounding_mode="trunc"))

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None, op: Any = None) -> Work:
        """Reduces a tensor of each rank. Of several, the tensors of all ranks are reduced to one result, which each of them gets."""
        opts = _options(opts, c10d.AllreduceOptions, reduceOp=op)
        tensors = _listed(tensors)
        if not tensors:
            raise ArgumentError("allreduce requires non-empty tensor list")
        _check_alike(tensors[1:], tensors[0])
        if tensors[0].layout == torch.sparse_coo:
            return self._allreduce_sparse(tensors, opts)
        _check(tensors)
        if len(tensors) > 1:
            return self._allreduce_several(tensors, opts)
        staged = _Staged(tensors[0], dtype=_WIDER.get(tensors[0].dtype))
        data, name, dtype = self._reducible(staged.tensor, opts)
        memory, note = _memory(data), recorder.note("all_reduce", tensors, tensors)

        def finish() -> None:
            self._average(staged.tensor, opts)
            staged.write_back()

        def start(wait: bool, timeout: float | None) -> Any:
            return self._group.allreduce(memory, name, dtype=dtype, timeout=timeout, note=note, wait=wait)

        return self._work(opts, tensors, start, finish)

    def _allreduce_several(self, tensors: list[Tensor], opts: Any) -> Work:
        """Reduces the tensors of this process to one first."""
        kind = _op(opts)
        if kind not in _LOCAL_OPS:
            raise ArgumentError(f"unsupported reduction operation of several tensors: {kind}")
        own = tensors[0].clone(memory_format=torch.contiguous_format)
        for tensor in tensors[1:]:
            own = _LOCAL_OPS[kind](own, tensor)

        def finish() -> None:
            for tensor in tensors:
                tensor.copy_(own)

        work = self.allreduce([own], opts)
        return self._coalesced([work], tensors, finish)

    def allreduce_sparse(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def _allreduce_sparse(self, tensors: list[Tensor], opts: Any) -> Work:
        """Gathers the elements of all ranks, and adds those with the same index."""
        if _op(opts) not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ArgumentError(f"unsupported reduction operation: sparse tensors can be summed, not reduced with {_op(opts)}")
        if any(tensor.shape != tensors[0].shape for tensor in tensors):
            raise ArgumentError(f"invalid tensor size: {[tuple(tensor.shape) for tensor in tensors]} in one call")
        own = sum(tensors[1:], tensors[0]).coalesce()
        group, size, timeout = self._group, self._size, self._seconds(opts)
        counts = torch.zeros(size, dtype=torch.int64)
        counts[self._rank] = own._nnz()
        group.allgather(_memory(counts), timeout=timeout)
        total, first = int(counts.sum()), int(counts[: self._rank].sum())
        mine = slice(first, first + own._nnz())
        # One row for each element, so that a rank's elements are consecutive.
        indices = torch.zeros((total, own.sparse_dim()), dtype=torch.int64)
        indices[mine] = own.indices().t()
        values = torch.zeros((total, *own.values().shape[1:]), dtype=own.dtype)
        values[mine] = own.values()
        for part in (indices, values):
            row = part[0].numel() if total else 0
            group.allgather(_memory(part), counts=[count * row for count in counts.tolist()], timeout=timeout)
        summed = torch.sparse_coo_tensor(indices.t(), values, own.shape).coalesce()
        if _op(opts) == ReduceOp.AVG:
            summed = summed / size
        for tensor in tensors:
            tensor.copy_(summed)
        return Work(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Reduces each of the tensors over the ranks, all of them as one."""
        opts = _options(opts, c10d.AllreduceCoalescedOptions)
        if not tensors:
            raise ArgumentError("allreduce_coalesced requires non-empty tensor list")
        for index, tensor in enumerate(tensors):
            if tensor.layout != tensors[0].layout:
                raise ArgumentError(f"invalid tensor layout at index {index}: {tensor.layout} beside {tensors[0].layout}")
        types = sorted({str(tensor.dtype) for tensor in tensors})
        if len(types) > 1:
            raise ArgumentError(f"tensors must all have the same type, not {', '.join(types)}")
        _check(tensors)
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        parts = flat.split([tensor.numel() for tensor in tensors])

        def finish() -> None:
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

        return self._coalesced([self.allreduce([flat], opts)], tensors, finish)

    def _coalesced(self, works: list[Work], tensors: list[Tensor] | list[list[Tensor]], then: Callable[[], None] | None = None) -> Work:
        """The works as one, which ends with `then`."""
        requests = [request for work in works for request in work._requests]

        def finish() -> None:
            for work in works:
                work._run_finish()
            if then is not None:
                then()

        return Work(tensors, requests, finish)

    def _root(self, root: int) -> int:
        if not 0 <= root < self._size:
            raise ArgumentError(f"invalid root rank {root}: the ranks are 0 to {self._size - 1}")
        return root

    def reduce(self, tensors: list[Tensor] | Tensor, opts: Any = None, op: Any = None, *, root: int | None = None) -> Work:
        opts = _options(opts, c10d.ReduceOptions, reduceOp=op, rootRank=root)
        tensor, root = _single(tensors), self._root(opts.rootRank)
        if opts.rootTensor != 0:
            raise ArgumentError(f"invalid root tensor {opts.rootTensor}: there is one")
        is_root = root == self._rank
        # The tensors of the other ranks stay what they are.
        staged = _Staged(tensor if is_root else _plain_copy(tensor), dtype=_WIDER.get(tensor.dtype))
        data, op, dtype = self._reducible(staged.tensor, opts)
        memory, note = _memory(data), recorder.note("reduce", [tensor], [tensor])

        def finish() -> None:
            if is_root:
                self._average(staged.tensor, opts)
                staged.write_back()

        def start(wait: bool, timeout: float | None) -> Any:
            return self._group.reduce(memory, op, root=root, dtype=dtype, timeout=timeout, note=note, wait=wait)

        return self._work(opts, [tensor], start, finish)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002 - torch's name
        opts = _options(opts, c10d.ReduceScatterOptions)
        _check([output, input])
        if output.numel() * self._size != input.numel():
            raise ArgumentError(f"reduce-scatter of {input.numel()} elements to {output.numel()} on each of {self._size} ranks")
        note = recorder.note("_reduce_scatter_base", [input], [output])
        return self._reduce_scatter(output, _plain_copy(input).view(-1), None, note, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        opts = _options(opts, c10d.ReduceScatterOptions)
        output, parts = _single(outputs), inputs[0]
        _check(parts)
        counts = [part.numel() for part in parts]
        if len(parts) != self._size or counts[self._rank] != output.numel():
            raise ArgumentError(f"reduce-scatter of parts of {counts} elements to {output.numel()} on rank {self._rank}")
        flat = torch.cat([part.reshape(-1) for part in parts])
        uneven = min(counts) < max(counts)
        note = recorder.note("reduce_scatter_v", [flat], [flat]) if uneven else recorder.note("reduce_scatter", [flat], [output])
        return self._reduce_scatter(output, flat, counts, note, opts)

    def _reduce_scatter(self, output: Tensor, flat: Tensor, counts: list[int] | None, note: str, opts: Any) -> Work:
        """Reduces `flat`, which is overwritten, to this rank's part of it."""
        flat = flat.to(_WIDER.get(flat.dtype, flat.dtype))
        first = sum(counts[: self._rank]) if counts else self._rank * output.numel()
        data, op, dtype = self._reducible(flat, opts)
        scale = data.numel() // flat.numel() if flat.numel() else 1
        parts = [count * scale for count in counts] if counts else None
        memory = _memory(data)

        def finish() -> None:
            part = flat[first : first + output.numel()]
            self._average(part, opts)
            output.copy_(part.view(output.shape))

        def start(wait: bool, timeout: float | None) -> Any:
            return self._group.reduce_scatter(memory, op, counts=parts, dtype=dtype, timeout=timeout, note=note, wait=wait)

        return self._work(opts, [output], start, finish)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        works = [self.reduce_scatter_single(output, part, opts) for output, part in zip(outputs, inputs, strict=True)]
        return self._coalesced(works, outputs)

    # Operations that move data

    def broadcast(self, tensors: list[Tensor] | Tensor, opts: Any = None, *, root: int | None = None) -> Work:
        """Sends a tensor of the root to all ranks. Each may take it into several tensors."""
        opts = _options(opts, c10d.BroadcastOptions, rootRank=root)
        tensors, root = _listed(tensors), self._root(opts.rootRank)
        if not 0 <= opts.rootTensor < len(tensors):
            raise ArgumentError(f"invalid root tensor {opts.rootTensor} of {len(tensors)}")
        _check(tensors)
        _check_alike(tensors[1:], tensors[0])
        source = tensors[opts.rootTensor]
        others = [tensor for tensor in tensors if tensor is not source]
        staged = _Staged(source)
        memory, note = _memory(staged.tensor), recorder.note("broadcast", [source], [source])

        def finish() -> None:
            staged.write_back()
            for tensor in others:
                tensor.copy_(source)

        def start(wait: bool, timeout: float | None) -> Any:
            return self._group.broadcast(memory, root=root, timeout=timeout, note=note, wait=wait)

        return self._work(opts, tensors, start, finish)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002 - torch's name
        opts = _options(opts, c10d.AllgatherOptions)
        _check([output, input])
        if output.numel() != input.numel() * self._size or output.dtype != input.dtype:
            raise ArgumentError(
                f"all-gather of {input.numel()} elements of {input.dtype} on each of {self._size} ranks to "
                f"{output.numel()} of {output.dtype}"
            )
        staged = _Staged(output, fill=False)
        own = staged.tensor.view(-1)[self._rank * input.numel() :][: input.numel()]
        if not _is_plain(input) or own.data_ptr() != input.data_ptr():
            own.copy_(input.reshape(-1))
        memory, note = _memory(staged.tensor), recorder.note("_all_gather_base", [input], [output])

        def start(wait: bool, timeout: float | None) -> Any:
            return self._group.allgather(memory, timeout=timeout, note=note, wait=wait)

        return self._work(opts, [output], start, staged.write_back)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        works = [self.all_gather_single(output, part, opts) for output, part in zip(outputs, inputs, strict=True)]
        return self._coalesced(works, outputs)

    def allgather(self, outputs: list[list[Tensor]] | list[Tensor], inputs: list[Tensor] | Tensor, opts: Any = None) -> Work:
        """Gathers the tensors of all ranks. With several a rank, each list of `outputs` gets those of rank 0, then those of rank 1..."""
        opts = _options(opts, c10d.AllgatherOptions)
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if not inputs:
            raise ArgumentError("allgather requires non-empty input tensor list")
        if len(outputs) != len(inputs):
            raise ArgumentError(
                f"allgather requires input/output tensor lists to have the same length, not {len(inputs)} and {len(outputs)}"
            )
        number = len(inputs)
        if any(len(parts) != number * self._size for parts in outputs):
            raise ArgumentError(
                f"invalid output tensor list of {[len(parts) for parts in outputs]} tensors: {number * self._size} each are needed"
            )
        _check(inputs)
        if number == 1:
            own, parts = inputs[0], outputs[0]  # whose sizes may differ
        else:
            _check_alike(inputs, inputs[0])
            own = torch.stack([tensor.reshape(-1) for tensor in inputs])
            parts = [torch.empty_like(own) for _ in range(self._size)]
        for gathered in outputs:
            _check(gathered)
            for index, tensor in enumerate(gathered):
                if tensor.dtype != inputs[0].dtype:
                    raise ArgumentError(f"invalid tensor type at index {index}: {tensor.dtype} beside {inputs[0].dtype}")
        work = self._allgather(parts, own, opts)
        if number == 1:
            return work

        def finish() -> None:
            for gathered in outputs:
                for index, tensor in enumerate(gathered):
                    tensor.copy_(parts[index // number][index % number].view(tensor.shape))

        return self._coalesced([work], outputs, finish)

    def _allgather(self, parts: list[Tensor], own: Tensor, opts: Any) -> Work:
        """Gathers a tensor of each rank."""
        counts = [part.numel() for part in parts]
        if counts[self._rank] != own.numel():
            raise ArgumentError(f"invalid tensor size: all-gather of {own.numel()} elements on rank {self._rank} to parts of {counts}")
        flat = torch.empty(sum(counts), dtype=own.dtype)
        ends = flat.split(counts)
        ends[self._rank].copy_(own.reshape(-1))
        uneven = min(counts) < max(counts)
        note = recorder.note("all_gather_v", [flat], [flat]) if uneven else recorder.note("all_gather", [own], [flat])
        memory = _memory(flat)

        def finish() -> None:
            for part, data in zip(parts, ends, strict=True):
                part.copy_(data.view(part.shape))

        def start(wait: bool, timeout: float | None) -> Any:
            return self._group.allgather(memory, counts=counts, timeout=timeout, note=note, wait=wait)

        return self._work(opts, parts, start, finish)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = _options(opts, c10d.AllgatherOptions)
        if len(outputs) != self._size:
            raise ArgumentError(f"the number of output lists should be equal to world size {self._size}, not {len(outputs)}")
        for parts in outputs:
            if len(parts) != len(inputs):
                raise ArgumentError(f"invalid output size: {len(parts)} tensors for {len(inputs)} of each rank")
            for index, (part, own) in enumerate(zip(parts, inputs, strict=True)):
                if part.dtype != own.dtype:
                    raise ArgumentError(f"invalid tensor type at index {index}: {part.dtype} for {own.dtype}")
                if part.numel() != own.numel():
                    raise ArgumentError(f"invalid size of output tensor at index {index}: {part.numel()} elements for {own.numel()}")
        # The outputs of each rank come together here, and those of each input in an all-gather.
        works = [
            self.allgather([[parts[number] for parts in outputs]], [own], opts) for number, own in enumerate(inputs)
        ]
        return self._coalesced(works, [part for parts in outputs for part in parts])

    def gather(
        self, outputs: list[list[Tensor]] | list[Tensor], inputs: list[Tensor] | Tensor, opts: Any = None, *, root: int | None = None
    ) -> Work:
        opts = _options(opts, c10d.GatherOptions, rootRank=root)
        own, root = _single(inputs, "input tensor list"), self._root(opts.rootRank)
        if isinstance(inputs, Tensor) and outputs:
            outputs = [outputs]
        data = _plain(own)
        parts = self._parts(outputs, own, root, "output")
        flat = torch.empty((len(parts), own.numel()), dtype=own.dtype)
        memory = _memory(flat) if root == self._rank else None
        note = recorder.note("gather", [own], [flat] if parts else [])

        def finish() -> None:
            for part, row in zip(parts, flat, strict=True):
                part.copy_(row.view(part.shape))

        def start(wait: bool, timeout: float | None) -> Any:
            return self._group.gather(_memory(data), memory, root=root, timeout=timeout, note=note, wait=wait)

        return self._work(opts, parts, start, finish)

    def scatter(
        self, outputs: list[Tensor] | Tensor, inputs: list[list[Tensor]] | list[Tensor], opts: Any = None, *, root: int | None = None
    ) -> Work:
        opts = _options(opts, c10d.ScatterOptions, rootRank=root)
        own, root = _single(outputs, "output tensor list"), self._root(opts.rootRank)
        if isinstance(outputs, Tensor) and inputs:
            inputs = [inputs]
        parts = self._parts(inputs, own, root, "input")
        staged = _Staged(own, fill=False)
        flat = torch.cat([part.reshape(-1) for part in parts]) if parts else None
        source = _memory(flat) if flat is not None else None
        note = recorder.note("scatter", [flat] if parts else [], [own])

        def start(wait: bool, timeout: float | None) -> Any:
            return self._group.scatter(_memory(staged.tensor), source, root=root, timeout=timeout, note=note, wait=wait)

        return self._work(opts, [own], start, staged.write_back)

    def _parts(self, lists: list[list[Tensor]], own: Tensor, root: int, what: str) -> list[Tensor]:
        """The tensors of all ranks, which the root of a gather or scatter has and no other rank."""
        if root != self._rank:
            if lists:
                raise ArgumentError(f"this rank is not the root {root}: gather and scatter requires empty {what} on non-root")
            return []
        if len(lists) != 1:
            raise ArgumentError(f"the root requires a single-element {what} list, not one of {len(lists)}")
        parts = lists[0]
        if len(parts) != self._size:
            raise ArgumentError(f"Incorrect {what} list size {len(parts)}. {what.capitalize()} list size should be {self._size}")
        _check(parts)
        _check_alike(parts, own)
        return parts

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's name
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        opts = _options(opts, c10d.AllToAllOptions)
        _check([output, input])
        staged, data = _Staged(output, fill=False), _plain(input)

        def counts(tensor: Tensor, splits: list[int]) -> list[int]:
            rows = tensor.shape[0] if tensor.dim() else 1
            row = tensor.numel() // rows if rows else 0
            if splits:
                if len(splits) != self._size or sum(splits) != rows:
                    raise ArgumentError(f"split sizes {splits} for {rows} rows and {self._size} ranks")
                return [split * row for split in splits]
            if rows % self._size:
                raise ArgumentError(f"{rows} rows are not divisible by {self._size} ranks")
            return [rows // self._size * row] * self._size

        sent, received = counts(data, input_split_sizes), counts(output, output_split_sizes)
        note = recorder.note("all_to_all", [input], [output])

        def start(wait: bool, timeout: float | None) -> Any:
            source, target = _memory(data), _memory(staged.tensor)
            return self._group.alltoall(source, target, sent=sent, received=received, timeout=timeout, note=note, wait=wait)

        return self._work(opts, [output], start, staged.write_back)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = _options(opts, c10d.AllToAllOptions)
        _check([*outputs, *inputs])
        sent, received = [part.numel() for part in inputs], [part.numel() for part in outputs]
        source = torch.cat([part.reshape(-1) for part in inputs])
        target = torch.empty(sum(received), dtype=source.dtype)
        note = recorder.note("all_to_all", [source], [target])

        def finish() -> None:
            for part, data in zip(outputs, target.split(received), strict=True):
                part.copy_(data.view(part.shape))

        def start(wait: bool, timeout: float | None) -> Any:
            group, ends = self._group, (_memory(source), _memory(target))
            return group.alltoall(*ends, sent=sent, received=received, timeout=timeout, note=note, wait=wait)

        return self._work(opts, outputs, start, finish)

    # Messages

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work:
        tensor = _single(tensors)
        data = _plain(tensor)
        if dst == self._rank:
            return Work([tensor], [self._loopback.send(data, tag)])
        note = recorder.note("send", [tensor], [])
        request = self._group.send(_memory(data), dst, tag=tag, timeout=self._limit, note=note, wait=False)
        return Work([tensor], [request])

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work:
        return self._recv(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        return self._recv(tensors, None, tag)

    def _recv(self, tensors: list[Tensor], src: int | None, tag: int) -> Work:
        tensor = _single(tensors)
        staged = _Staged(tensor, fill=False)
        if src == self._rank:
            return Work([tensor], [self._loopback.recv(staged.tensor, tag)], staged.write_back)
        note = recorder.note("recv", [], [tensor])
        request = self._group.recv(_memory(staged.tensor), src, tag=tag, timeout=self._limit, note=note, wait=False)
        return Work([tensor], [request], staged.write_back)

    # Barriers, and the group itself

    def barrier(self, opts: Any = None) -> Work:
        def start(wait: bool, timeout: float | None) -> Any:
            return self._group.barrier(timeout=timeout, wait=wait)

        return self._work(_options(opts, c10d.BarrierOptions), [], start)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that have not come, in the words of Gloo's."""
        limit = getattr(timeout, "timeout", timeout)
        limit = limit if isinstance(limit, timedelta) and limit != timedelta(milliseconds=-1) else None
        if limit == timedelta(0):
            raise RuntimeError(f"Rank {self._rank} timed out in monitoredBarrier after 0 ms")
        try:
            self._group.barrier(timeout=limit.total_seconds() if limit else self._limit)
        except evenkeel.Error as error:
            missing = sorted(set(error.ranks) - {self._rank}) or ["?"]
            if not wait_all_ranks:
                missing = missing[:1]
            names = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            if self._rank == 0:
                text = f"[Rank 0]: {names} failed to pass monitoredBarrier: {error}"
            else:
                text = (
                    f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                    f"from rank 0: {names} did not reach it: {error}"
                )
            raise RuntimeError(text) from error

    def abort(self) -> None:
        reason = "torch.distributed aborted the process group"
        self._group.abort(reason)
        self._loopback.abort(reason)

    def shutdown(self) -> None:
        self._group.close()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    # Names of other versions of torch.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _options(opts: Any, kind: type, **given: Any) -> Any:
    """The options of a call. As with torch's own backends, one of them may take their place: a root, a reduction, or a timeout."""
    places = ((ReduceOp, "reduceOp"), (ReduceOp.RedOpType, "reduceOp"), (timedelta, "timeout"), (int, "rootRank"))
    for place, name in places:
        if isinstance(opts, place):
            given, opts = given | {name: opts}, None
    if opts is None:
        opts = kind()
    for name, value in given.items():
        if value is not None:
            setattr(opts, name, value)
    return opts


class EvenkeelBackend(Operations, Backend):
    """The backend, for one of the devices of a process group."""

    # Said here, because torch asks the class itself for each of them.
    supports_abort_hooks = False
    supports_coalescing = False
    supports_completion_hooks = False
    supports_reconfigure = True
    supports_shrinking = False
    supports_splitting = False
    supports_window = False
    _supports_time_estimate = False

    def __init__(self, opts: Any) -> None:
        Backend.__init__(self, opts.group_rank, opts.group_size)
        self._rank, self._size, self._store, self._timeout = opts.group_rank, opts.group_size, opts.store, opts.timeout
        self._name, self._ranks = opts.group_id, list(opts.global_ranks_in_group)
        self._loopback = Loopback(self._rank, self._timeout.total_seconds())
        self._handle = f"{self._rank}/{secrets.token_hex(8)}"
        # With enable_reconfigure, the group comes to be in the first call of reconfigure.
        self._joined: evenkeel.Group | None = None
        if not getattr(opts, "enable_reconfigure", False):
            self._joined = join(self._store, self._rank, self._size, self._timeout, self._name, self._ranks)
        if not self._ranks:
            recorder.watch(self._store)

    @property
    def _group(self) -> evenkeel.Group:
        if self._joined is None:
            raise RuntimeError("the process group has enable_reconfigure: call torch.distributed._reconfigure first")
        return self._joined

    def get_reconfigure_handle(self) -> str:
        return self._handle

    def reconfigure(self, opts: Any) -> Work:
        """Joins the group of these handles, in the place of the one before, whose ranks may be lost. Returns when all have come."""
        handles = list(opts.handles)
        if not isinstance(opts.handles, list):
            handles.sort(key=lambda handle: int(handle.partition("/")[0]))
        if len(handles) != self._size or handles[self._rank] != self._handle:
            raise ValueError(
                f"reconfigure of rank {self._rank} of {self._size} to handles {handles}: torch {torch.__version__} gives backend "
                f"{NAME} no way to change a rank or the number of ranks: put another process in the place of each lost one"
            )
        if self._joined is not None:
            self._joined.close()
        # The same store for processes that have made other groups before.
        store = self._store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        store = dist.PrefixStore(f"evenkeel/reconfigure/{opts.uuid}", store)
        timeout = opts.timeout or self._timeout
        self._loopback.abort("the process group was reconfigured")
        self._loopback = Loopback(self._rank, self._limit or timeout.total_seconds())
        self._joined = join(store, self._rank, self._size, timeout, self._name, self._ranks)
        return Work([])

    def shutdown(self) -> None:
        if not self._ranks:
            recorder.unwatch()
        if self._joined is not None:
            self._joined.close()


class EvenkeelProcessGroup(Operations, ProcessGroup):
    """The process group, where the backend is the only one. Callers in Python get its works directly."""

    def __init__(self, backend: EvenkeelBackend) -> None:
        ProcessGroup.__init__(self, backend._rank, backend._size)
        self._backend, self._rank, self._size = backend, backend._rank, backend._size
        kind = ProcessGroup.BackendType.CUSTOM
        self._register_backend(torch.device("cpu"), kind, backend)
        self._set_default_backend(kind)

    @property
    def _group(self) -> evenkeel.Group:
        return self._backend._group

    @property
    def _loopback(self) -> Loopback:
        return self._backend._loopback

    @property
    def _limit(self) -> float | None:
        return self._backend._limit

    def set_timeout(self, timeout: timedelta) -> None:
        self._backend.set_timeout(timeout)

    def shutdown(self) -> None:
        self._backend.shutdown()


class _WholeProcessGroup(Operations, ProcessGroup):
    """The process group without a backend in it, of which torch would ask the group's name."""

    def __init__(self, opts: Any) -> None:
        ProcessGroup.__init__(self, opts.group_rank, opts.group_size)
        self._rank, self._size, self._ranks = opts.group_rank, opts.group_size, list(opts.global_ranks_in_group)
        self._group = join(opts.store, self._rank, self._size, opts.timeout, opts.group_id, self._ranks)
        self._loopback = Loopback(self._rank, opts.timeout.total_seconds())
        if not self._ranks:
            recorder.watch(opts.store)

    def shutdown(self) -> None:
        if not self._ranks:
            recorder.unwatch()
        self._group.close()

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        return self._description


def join(store: Any, rank: int, size: int, timeout: timedelta, name: str, ranks: list[int]) -> evenkeel.Group:
    """Joins a group with torch's name of it. `ranks` are its ranks' numbers in the job; none for the default group."""
    group = evenkeel.init(
        store,
        rank,
        size,
        transport=os.environ.get("EVENKEEL_TORCH_TRANSPORT", "auto"),
        timeout=timeout.total_seconds(),
    )
    group.set_name(name, ranks or list(range(size)))
    return group


def _create(opts: Any, _backend_options: Any) -> Backend | ProcessGroup:
    """Makes the backend of a process group. All of its ranks call this."""
    if not _BESIDE_OTHERS:
        return _WholeProcessGroup(opts)
    backend = EvenkeelBackend(opts)
    # torch sets the type of the backend before when it is the only one.
    return EvenkeelProcessGroup(backend) if opts.process_group.name() == "custom" else backend


def register() -> None:
    """Makes the backend known to torch.distributed. Done when this module is imported."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


register()
