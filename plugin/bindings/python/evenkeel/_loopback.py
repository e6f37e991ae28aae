"""Messages of a rank to itself, which no link carries: each send meets the receive of the same tag, in order."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable

import torch
from torch import Tensor

from evenkeel.errors import AbortedError, Error, MismatchError, TimeoutError


class LoopbackRequest:
    """A send or a receive in progress, with the methods of `evenkeel.Request` that a work needs."""

    def __init__(self, rank: int, what: str, data: Tensor, timeout: float) -> None:
        self._rank, self._what, self._timeout = rank, what, timeout
        self._data: Tensor | None = data
        self._started = time.monotonic()
        self._condition = threading.Condition()
        self._outcome: int | Error | None = None
        self._callbacks: list[Callable[[LoopbackRequest], object]] = []

    def wait(self, timeout: float | None = None) -> tuple[int, int]:
        """Returns this rank and the number of bytes. Raises what ended the message, or `TimeoutError` after `timeout` seconds, by
        default the group's timeout."""
        left = self._started + self._timeout - time.monotonic() if timeout is None else timeout
        with self._condition:
            self._condition.wait_for(self.test, max(left, 0))
            outcome = self._outcome
        if outcome is None:
            raise TimeoutError(f"{self._what}: there is no call of this rank for the other end of it yet")
        if isinstance(outcome, Error):
            raise outcome
        return self._rank, outcome

    def test(self) -> bool:
        return self._outcome is not None

    def add_done_callback(self, callback: Callable[["LoopbackRequest"], object]) -> None:
        with self._condition:
            if self._outcome is None:
                self._callbacks.append(callback)
                return
        callback(self)

    def _end(self, outcome: int | Error) -> None:
        with self._condition:
            self._outcome, self._data = outcome, None
            callbacks, self._callbacks = self._callbacks, []
            self._condition.notify_all()
        for callback in callbacks:
            callback(self)

    def _bytes(self) -> Tensor:
        if self._data is None:
            raise RuntimeError("a request that has ended keeps no tensor")
        return self._data.view(-1).view(torch.uint8)


class Loopback:
    """The messages of a group's rank to itself. Tensors are contiguous, and are not to be changed or read before their request ends."""

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank, self._timeout = rank, timeout
        self._lock = threading.Lock()
        self._sends: defaultdict[int, deque[LoopbackRequest]] = defaultdict(deque)
        self._receives: defaultdict[int, deque[LoopbackRequest]] = defaultdict(deque)

    def set_timeout(self, timeout: float) -> None:
        """Sets the timeout of messages that follow, in seconds."""
        self._timeout = timeout

    def send(self, data: Tensor, tag: int) -> LoopbackRequest:
        request = LoopbackRequest(self._rank, f"send of tag {tag} to this rank itself", data, self._timeout)
        self._match(tag, self._sends, request)
        return request

    def recv(self, target: Tensor, tag: int) -> LoopbackRequest:
        request = LoopbackRequest(self._rank, f"receive of tag {tag} from this rank itself", target, self._timeout)
        self._match(tag, self._receives, request)
        return request

    def abort(self, reason: str) -> None:
        """Ends what is in progress."""
        with self._lock:
            requests = [request for ends in (self._sends, self._receives) for queue in ends.values() for request in queue]
            self._sends.clear()
            self._receives.clear()
        for request in requests:
            request._end(AbortedError(reason))

    def _match(self, tag: int, ends: defaultdict[int, deque[LoopbackRequest]], request: LoopbackRequest) -> None:
        with self._lock:
            ends[tag].append(request)
            if not (self._sends[tag] and self._receives[tag]):
                return
            sent, received = self._sends[tag].popleft(), self._receives[tag].popleft()
            data, target = sent._bytes(), received._bytes()
            outcome: int | Error = data.numel()
            if data.numel() > target.numel():
                outcome = MismatchError(f"{received._what}: the message has {data.numel()} bytes, and the tensor {target.numel()}")
            else:
                target[: data.numel()].copy_(data)
        for end in (sent, received):
            end._end(outcome)
