"""Arrays: numpy arrays, tensors on the CPU (torch's, say), and whatever else has the buffer protocol or ``__dlpack__``, C-contiguous.
They are used where they lie, without copies; nobody may change them, or read those that are written, before the call returns.
Other threads run meanwhile.

Reductions know int8, uint8, int32, uint32, int64, uint64, float16, float32, float64, bfloat16, float8_e4m3fn and float8_e5m2;
``dtype`` says so for arrays of types that numpy itself does not have: ``group.allreduce(x.view("u2"), dtype="bfloat16")`` for an
array of ml_dtypes. Operations that move data take elements of any type. Counts are numbers of elements.

``tag``: operations with different tags may be in progress at the same time, from different threads; those with the same tag are
called in the same order on all ranks. ``timeout``: seconds for which nothing may move in the operation.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias, final

from evenkeel.errors import Error

class _Lends(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class _Buffer(Protocol):
    def __buffer__(self, flags: int, /) -> memoryview: ...

_Array: TypeAlias = _Lends | _Buffer

__version__: str

def init(
    store: str | MemoryStore | None = None,
    rank: int | None = None,
    size: int | None = None,
    *,
    name: str = "default",
    transport: str = "tcp",
    timeout: float = 30.0,
) -> Group:
    """Joins the group of this name; returns once all ranks have.

    Without arguments, the launcher's environment says which rank this is (evenkeel-run, torchrun, mpirun, srun), and where to meet:
    EVENKEEL_STORE, or MASTER_ADDR and MASTER_PORT, where rank 0 serves a store.

    store: ``"tcp://host:port"``, ``"file:/shared/folder"``, ``"redis://host:port"``, or a MemoryStore for ranks that are threads.
    rank, size: this rank's number, from 0, and the number of ranks.
    name: groups that live at the same time have different names.
    transport: ``"tcp"``, ``"tcp:eth0"`` (over this interface), ``"shm"`` (shared memory, for ranks of one host), or ``"auto"`` or
        ``"auto:eth0"`` (shared memory within hosts, TCP between them), or ``"tls"`` or ``"tls:eth0"`` (encrypted TCP between ranks
        that show certificates: the environment variables EVENKEEL_TLS_CERT, EVENKEEL_TLS_KEY and EVENKEEL_TLS_CA name the PEM files
        with this rank's certificate, its key, and the certificates of the authority that has signed all ranks').
    timeout: seconds to wait for the others, and for which nothing may move in an operation from then on.

    Raises TimeoutError naming the ranks that have not come.
    """

@final
class Group:
    """One rank's part in a group. As a context manager it is left at the end."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def timeout(self) -> float:
        """Seconds for which nothing may move in an operation."""

    @property
    def failure(self) -> Error | None:
        """The error that ended the group, if it has ended."""

    def describe(self, rank: int) -> str:
        """A rank, for people: its host and process."""

    def allreduce(
        self,
        array: _Array,
        op: str = "sum",
        *,
        algorithm: str | None = None,
        dtype: str | None = None,
        tag: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Combines what all ranks have, in place: afterwards all have the same, to the bit.

        op: ``"sum"``, ``"prod"``, ``"max"`` or ``"min"``.
        algorithm: ``"ring"``, ``"ring_chunked"``, ``"halving_doubling"``, ``"recursive_doubling"`` or ``"bcube"``; by default it is chosen by the
        number of ranks and bytes.
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
    ) -> None:
        """Combines what all ranks have, in place, for rank ``root``; what is in the others' arrays afterwards is undefined."""

    def reduce_scatter(
        self,
        array: _Array,
        op: str = "sum",
        *,
        counts: Sequence[int] | None = None,
        dtype: str | None = None,
        tag: int = 0,
        timeout: float | None = None,
    ) -> slice:
        """Combines what all ranks have: afterwards rank i has part i, at its place in the array; the rest is undefined.

        counts: the parts' numbers of elements; by default equal. Gives the own part's place: ``array.ravel()[part]``.
        """

    def broadcast(self, array: _Array, *, root: int = 0, tag: int = 0, timeout: float | None = None) -> None:
        """Gives all ranks what rank ``root`` has."""

    def allgather(
        self, array: _Array, *, counts: Sequence[int] | None = None, tag: int = 0, timeout: float | None = None
    ) -> None:
        """Each rank has its part at its place in the array; afterwards all have all.

        counts: the parts' numbers of elements; by default equal.
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
    ) -> None:
        """Every rank's input goes to rank ``root``, which alone gives an output, one rank's after the other's.

        counts: the inputs' numbers of elements, the same list on all ranks; by default all are as long as this rank's.
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
    ) -> None:
        """The input of rank ``root``, which alone gives one, goes to the ranks, a part for each.

        counts: the outputs' numbers of elements, the same list on all ranks; by default all are as long as this rank's.
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
    ) -> None:
        """Part i of the input goes to rank i; part i of the output comes from rank i.

        sent, received: the parts' numbers of elements; by default equal.
        """

    def barrier(self, *, tag: int = 0, timeout: float | None = None) -> None:
        """Returns when all ranks have called it."""

    def send(self, array: _Array, to: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Sends a message of up to 1 GiB to another rank. Messages of a tag arrive in their order."""

    def recv(
        self, array: _Array, source: int | None = None, *, tag: int = 0, timeout: float | None = None
    ) -> tuple[int, int]:
        """Receives a message, from any rank by default; gives the rank and how many elements came."""

    def sub_group(self, ranks: Sequence[int]) -> Group | None:
        """A group of some of the ranks, numbered in the order given; None on the others. It costs no message.

        The ranks of the new group make groups of the same ranks in the same order. When one group fails, so does the other.
        """

    def split(self, color: int | None, *, tag: int = 0, timeout: float | None = None) -> Group | None:
        """The group of all ranks that give the same color; None without one. All ranks call it."""

    def abort(self, reason: str) -> None:
        """Ends the group for all ranks: their operations raise AbortedError with this reason."""

    def close(self) -> None:
        """Leaves the group. Waits up to a second until the others have what this rank sent."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

@final
class MemoryStore:
    """Where ranks meet that are threads of this process."""

    def __init__(self) -> None: ...

@final
class StoreServer:
    """Serves a store to ranks anywhere until it is closed. Whoever reaches the port can use it."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        """Listens at an address; port 0 is any that is free."""

    @property
    def address(self) -> str:
        """For ``init``, or EVENKEEL_STORE: ``"tcp://host:port"``."""

    def close(self) -> None:
        """Ends it."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
