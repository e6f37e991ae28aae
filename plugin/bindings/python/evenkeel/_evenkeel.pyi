"""Arrays are numpy arrays, tensors on the CPU (of torch, for example), and other objects with the buffer protocol or
``__dlpack__``, C-contiguous. They are used in place, without copies. No other thread may change them, or read those that the call
writes, before the call returns. Other threads run meanwhile.

Reductions work on int8, uint8, int32, uint32, int64, uint64, float16, float32, float64, bfloat16, float8_e4m3fn and float8_e5m2.
``dtype`` names the type if numpy itself does not have it: ``group.allreduce(x.view("u2"), dtype="bfloat16")`` for an array of
ml_dtypes. Operations that only move data take elements of any type. Counts are numbers of elements.

``tag``: operations with different tags may be in progress at the same time, from different threads. Operations with the same tag
must be called in the same order on all ranks. ``timeout``: seconds for which the operation may make no progress. ``note``: a text
for the flight recorder, such as the name of what is reduced. ``wait``: with
False the call starts the operation and returns a ``Request`` at once. The operation makes progress by itself. Collective operations
of a tag run in the order in which they were started, and so do messages of a tag to a rank, and from a rank. The arrays must not be
used until it is done.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias, final

from evenkeel.errors import Error

class _Dlpack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class _Buffer(Protocol):
    def __buffer__(self, flags: int, /) -> memoryview: ...

_Array: TypeAlias = _Dlpack | _Buffer

class _TorchStore(Protocol):
    def set(self, key: str, value: Any) -> Any: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...
    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes: ...
    def delete_key(self, key: str) -> Any: ...

__version__: str

def init(
    store: str | MemoryStore | _TorchStore | None = None,
    rank: int | None = None,
    size: int | None = None,
    *,
    name: str = "default",
    transport: str = "tcp",
    timeout: float = 30.0,
) -> Group:
    """Joins the group of this name. Returns once all ranks have joined.

    Without arguments, the environment of the launcher (evenkeel-run, torchrun, mpirun, srun) sets the rank, the number of ranks and
    the store: EVENKEEL_STORE, or MASTER_ADDR and MASTER_PORT, where rank 0 serves one.

    store: ``"tcp://host:port"``, ``"file:/shared/folder"``, ``"redis://host:port"``, a MemoryStore for ranks that are threads, or a
        torch.distributed.Store.
    rank, size: this process's rank, from 0, and the number of ranks.
    name: groups that exist at the same time need different names.
    transport: ``"tcp"``, ``"tcp:eth0"`` (over this interface), ``"shm"`` (shared memory, for ranks of one host), or ``"auto"`` or
        ``"auto:eth0"`` (shared memory within hosts, TCP between them), or ``"tls"`` or ``"tls:eth0"`` (TCP with TLS between ranks that
        authenticate by certificate). For TLS the environment variables EVENKEEL_TLS_CERT, EVENKEEL_TLS_KEY and EVENKEEL_TLS_CA name
        the PEM files with this rank's certificate, its key, and the certificates of the authority that signed all of them.
    timeout: seconds to wait for the other ranks, and the group's timeout from then on.

    Raises TimeoutError naming the ranks that have not joined.
    """

def join_as_newcomer(
    store: str | MemoryStore | _TorchStore,
    *,
    name: str = "default",
    transport: str = "tcp",
    timeout: float = 30.0,
) -> Group:
    """Joins the next group that the ranks of the group of this name make by ``reconfigure``. The arguments are those of ``init``.

    Raises TimeoutError when there is none in time.
    """

def flight_record() -> str:
    """The last calls of this process, as JSON, for ``evenkeel.flight_recorder``."""

def rank_record(describe: Callable[[str], str], /) -> tuple[int, str] | None:
    """This process's rank in the job, and its record as JSON; None without a group. ``describe`` returns what a group of a name is called,
    or ``undefined``."""

def on_request(callback: Callable[[bool], object], /) -> None:
    """Calls ``callback`` when this process's record is to be written, on a thread of its own: with True when somebody asks for it, and with
    False once the process has a group. The last one counts."""

def on_failure(callback: Callable[[str], object], /) -> None:
    """Calls ``callback`` with the error's text after an operation has failed, on the thread that ran it. The last one counts."""

@final
class Group:
    """A rank's membership in a group. As a context manager it leaves the group at the end."""

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def timeout(self) -> float:
        """Seconds for which an operation may make no progress."""

    @property
    def failure(self) -> Error | None:
        """The error that ended the group, if it has failed."""

    @property
    def previous_ranks(self) -> list[int | None]:
        """For each rank, its rank in the group that was reconfigured; None for a newcomer. Empty if this group follows no other."""

    def reconfigure(self, *, min_size: int = 0, timeout: float | None = None) -> Group:
        """The group that follows this one: all ranks of this one that are alive, in the order of their ranks, and then the newcomers
        that wait in ``join_as_newcomer``. All live ranks call it: after an error that ended the group, or at any other time between
        operations. This group cannot be used afterwards.

        min_size: waits for newcomers until the group has at least this many ranks.
        timeout: seconds to wait for the other ranks; by default the group's timeout.

        Raises TimeoutError naming the live ranks that have not called it, which can call it again; LostError naming this rank when
        the others went on without it, which can come back by ``join_as_newcomer``; StoreError when the store cannot be reached.
        """

    def set_name(self, name: str, ranks: Sequence[int]) -> None:
        """Names the group for the flight recorder, and its ranks by their numbers in the job. The first name stays."""

    def describe(self, rank: int) -> str:
        """A rank for messages: its number, host and process."""

    def allreduce(
        self,
        array: _Array,
        op: str = "sum",
        *,
        algorithm: str | None = None,
        dtype: str | None = None,
        tag: int = 0,
        timeout: float | None = None,
        note: str | None = None,
        wait: bool = True,
    ) -> Request | None:
        """Reduces the arrays of all ranks, in place. Afterwards all ranks have the same result, bitwise.

        op: ``"sum"``, ``"prod"``, ``"max"`` or ``"min"``, or bit by bit ``"band"``, ``"bor"`` or ``"bxor"``, of any type.
        algorithm: ``"ring"``, ``"ring_chunked"``, ``"halving_doubling"``, ``"recursive_doubling"``, ``"bcube"``,
        ``"direct"`` or ``"hierarchical"``; by default it is selected by the number of ranks and bytes.
        """

    def reduce(
        self,
        array: _Array,
        op: str = "sum",
        *,
        root: int = 0,
        dtype: str | None = None,
        tag: int = 0,
        timeout: float | None = None,
        note: str | None = None,
        wait: bool = True,
    ) -> Request | None:
        """Reduces the arrays of all ranks to rank ``root``, in place. Afterwards the contents of the others' arrays are undefined."""

    def reduce_scatter(
        self,
        array: _Array,
        op: str = "sum",
        *,
        counts: Sequence[int] | None = None,
        dtype: str | None = None,
        tag: int = 0,
        timeout: float | None = None,
        note: str | None = None,
        wait: bool = True,
    ) -> Request | slice:
        """Reduces the arrays of all ranks and scatters the result: rank i gets part i, at its place in the array; the rest is undefined.

        counts: the numbers of elements of the parts; by default equal. Returns the slice of this rank's part: ``array.ravel()[part]``.
        """

    def broadcast(
        self,
        array: _Array,
        *,
        root: int = 0,
        tag: int = 0,
        timeout: float | None = None,
        note: str | None = None,
        wait: bool = True,
    ) -> Request | None:
        """Sends the array of rank ``root`` to all ranks."""

    def allgather(
        self,
        array: _Array,
        *,
        counts: Sequence[int] | None = None,
        tag: int = 0,
        timeout: float | None = None,
        note: str | None = None,
        wait: bool = True,
    ) -> Request | None:
        """Each rank passes its part at its place in the array. Afterwards all ranks have all parts.

        counts: the numbers of elements of the parts; by default equal.
        """

    def gather(
        self,
        input: _Array,
        output: _Array | None = None,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        tag: int = 0,
        timeout: float | None = None,
        note: str | None = None,
        wait: bool = True,
    ) -> Request | None:
        """Gathers the inputs of all ranks at rank ``root``, in the order of the ranks. Only the root passes an output.

        counts: the numbers of elements of the inputs, the same list on all ranks; by default all are as long as this rank's.
        """

    def scatter(
        self,
        output: _Array,
        input: _Array | None = None,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        tag: int = 0,
        timeout: float | None = None,
        note: str | None = None,
        wait: bool = True,
    ) -> Request | None:
        """Scatters the input of rank ``root``, a part for each rank. Only the root passes an input.

        counts: the numbers of elements of the outputs, the same list on all ranks; by default all are as long as this rank's.
        """

    def alltoall(
        self,
        input: _Array,
        output: _Array,
        *,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
        tag: int = 0,
        timeout: float | None = None,
        note: str | None = None,
        wait: bool = True,
    ) -> Request | None:
        """Sends part i of the input to rank i; part i of the output comes from rank i.

        sent, received: the numbers of elements of the parts; by default equal.
        """

    def barrier(
        self,
        *,
        tag: int = 0,
        timeout: float | None = None,
        note: str | None = None,
        wait: bool = True,
    ) -> Request | None:
        """Returns when all ranks have called it."""

    def send(
        self,
        array: _Array,
        to: int,
        *,
        tag: int = 0,
        timeout: float | None = None,
        note: str | None = None,
        wait: bool = True,
    ) -> Request | None:
        """Sends a message to another rank. Messages of a tag arrive in order."""

    def recv(
        self,
        array: _Array,
        source: int | None = None,
        *,
        tag: int = 0,
        timeout: float | None = None,
        note: str | None = None,
        wait: bool = True,
    ) -> Request | tuple[int, int]:
        """Receives a message, by default from any rank. Returns the rank and the number of elements."""

    def sub_group(self, ranks: Sequence[int]) -> Group | None:
        """A group of some of the ranks, numbered in the order given; None on the other ranks. It needs no message.

        The ranks of the new group must make groups of the same ranks in the same order. When one group fails, so does the other.
        """

    def split(self, color: int | None, *, tag: int = 0, timeout: float | None = None) -> Group | None:
        """The group of all ranks that pass the same color; None without a color. All ranks call it."""

    def set_link_rate(self, rate: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Sets the rate at which this rank's host can send and receive, in any unit that all ranks share, such as Mbit/s.

        All ranks call it, with no other operation in progress. From then on the algorithm ``"direct"`` gives each rank a share of the
        buffer that fits its link, and an all-reduce that names no algorithm takes it where it should be faster. 0 stands for an
        unknown rate: if any rank sets it, the shares are equal again. Groups that are made of this one afterwards have the same rates.
        """

    def abort(self, reason: str) -> None:
        """Aborts the group on all ranks. Their operations raise AbortedError with this reason."""

    def close(self) -> None:
        """Leaves the group. Waits up to a second until the other ranks have what this rank sent."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

@final
class RawMemory:
    """Memory by its address, for ``evenkeel.torch``. ``bytes`` bytes must be there as long as ``owner`` lives."""

    def __init__(self, address: int, bytes: int, item: int, owner: object, /) -> None: ...

@final
class Request:
    """An operation that was started with ``wait=False``. Dropping the request does not end the operation."""

    def wait(self, timeout: float | None = None) -> Any:
        """Waits until the operation is done, and returns what the call would have returned.

        timeout: seconds to wait at most. By default the operation's own timeout ends the wait.

        Raises what the call would have raised. TimeoutError also when ``timeout`` is over; the operation goes on then.
        """

    def test(self) -> bool:
        """Whether the operation is done, with success or not. Does not block."""

    def cancel(self) -> bool:
        """Ends the operation. Other ranks take part in it, so this aborts the group on all of them. False if it was done already."""

    def add_done_callback(self, callback: Callable[[Request], object]) -> None:
        """Calls ``callback`` with the request once it is done: at once if it is, otherwise on the thread that ran the operation."""

@final
class MemoryStore:
    """A store for ranks that are threads of this process."""

    def __init__(self) -> None: ...

@final
class StoreServer:
    """Serves a store until it is closed. Every process that can reach the port can use it."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        """Listens at an address. Port 0 picks a free port."""

    @property
    def address(self) -> str:
        """The address for ``init`` or EVENKEEL_STORE: ``"tcp://host:port"``."""

    def close(self) -> None:
        """Stops serving."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
