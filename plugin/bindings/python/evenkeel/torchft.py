"""A process group of torchft over Evenkeel, for tensors on the CPU.

::

    from evenkeel.torchft import ProcessGroupEvenkeel

    manager = torchft.Manager(pg=ProcessGroupEvenkeel(timeout=timedelta(seconds=10)), ...)

Each quorum has a group of its own, with connections and a store prefix of its own. Nothing of an earlier quorum can arrive in it.
``EVENKEEL_TORCH_TRANSPORT`` selects how the replicas reach each other, as for ``evenkeel.torch``.
"""

import contextlib
from datetime import timedelta
from typing import Any

from torchft.process_group import ProcessGroupWrapper

import evenkeel
from evenkeel._loopback import Loopback
from evenkeel.torch import Operations, join


class _Quorum(Operations):
    """The operations of the replicas of a quorum, which no process group of torch holds."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, ranks: list[int]) -> None:
        self._rank, self._size = rank, size
        self._loopback = Loopback(rank, timeout.total_seconds())
        self._group = join(store, rank, size, timeout, "torchft", ranks)

    def size(self) -> int:
        return self._size

    def failure(self) -> Exception | None:
        """The error that ended the group; `None` while it can be used, or once it is closed."""
        with contextlib.suppress(ValueError):
            return self._group.failure
        return None

    def abort(self) -> None:
        # A closed group has no operation in progress.
        with contextlib.suppress(ValueError):
            super().abort()
        self._group.close()


class ProcessGroupEvenkeel(ProcessGroupWrapper):
    """A process group that is configured anew for each quorum, in the place of torchft's ``ProcessGroupGloo``.

    timeout: how long an operation may make no progress, and how long the replicas of a quorum wait for each other in `configure`.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)
        self._failure: Exception | None = None

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "torchft-evenkeel"

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        """Joins the group of a quorum. torchft calls this after it has aborted the one before."""
        ranks = getattr(self, "_global_ranks", None) or []
        quorum = _Quorum(store, rank, world_size, self._timeout, ranks)
        self._failure = None
        return quorum

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later operations, and of later calls of `configure`."""
        super().set_timeout(timeout)
        if (quorum := self._pg) is not None:
            quorum.set_timeout(timeout)

    def errored(self) -> Exception | None:
        """The error that ended the group of this quorum, if one has: a lost replica, or `abort`. `configure` makes another group."""
        quorum = self._pg  # another thread may configure the next one
        if self._failure is None and quorum is not None and (failure := quorum.failure()) is not None:
            self._failure = evenkeel.AbortedError(f"the process group of this quorum is aborted: {failure}")
            self._failure.__cause__ = failure
        return self._failure

    def abort(self, errored: bool = True) -> None:
        """Ends the operations in progress, on all replicas of the quorum, with `evenkeel.AbortedError`."""
        self._failure = evenkeel.AbortedError("the process group of this quorum is aborted")
        super().abort(errored=errored)

    def shutdown(self) -> None:
        """Leaves the quorum's group. The other replicas get what was sent to them."""
        if (quorum := self._pg) is not None:
            quorum.shutdown()
        super().shutdown()
