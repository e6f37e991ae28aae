"""What torch knows of a process group and its calls, for the flight recorder; and that all ranks write theirs once one has failed, or once
somebody asks."""

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d as c10d

from evenkeel import flight_recorder
from evenkeel._operation import torch_note

_KEY = "evenkeel/flight_recorder"
"""The number of failures, in the store of the default group."""

_INTERVAL = 1.0
"""Seconds between two looks at it: as often as torch's own backend looks for ranks that want dumps."""


def note(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
    """The note of a call: torch's name of it, and the shapes and the type of its tensors."""
    tensor = (*inputs, *outputs)[0]
    return torch_note(name, _shapes(inputs), _shapes(outputs), str(tensor.dtype).removeprefix("torch."))


def _shapes(tensors: Sequence[Tensor]) -> list[list[int]]:
    # The reader looks at the first one also where a rank passes nothing.
    return [list(tensor.shape) for tensor in tensors] or [[0]]


def _describe(name: str) -> str:
    try:
        return c10d._resolve_process_group(name).group_desc or "undefined"
    except (AttributeError, RuntimeError):
        # The group was destroyed, or torch is too old to say.
        return "undefined"


class Watch:
    """Has all ranks of a store write the flight recorder once a call has failed on one: those that are stuck elsewhere too."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._wake, self._ended, self._told = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="evenkeel-recorder", daemon=True)
        self._thread.start()

    def tell(self) -> None:
        """This rank has written its own: the others are to write theirs. Gives them the time for it: a launcher may end them all when
        this rank exits."""
        if self._thread.is_alive():
            self._told.clear()
            self._wake.set()
            if self._told.wait(2 * _INTERVAL):
                self._ended.wait(2 * _INTERVAL)

    def end(self) -> None:
        self._ended.set()
        self._wake.set()

    def _run(self) -> None:
        try:
            seen = self._store.add(_KEY, 0)
            while not self._ended.is_set():
                if self._wake.wait(_INTERVAL):
                    self._wake.clear()
                    if not self._ended.is_set():
                        seen = self._store.add(_KEY, 1)
                        self._told.set()
                elif (failures := self._store.add(_KEY, 0)) != seen:
                    seen = failures
                    flight_recorder.dump_and_report("a call failed on another rank")
        except RuntimeError as error:
            # The rank that serves the store has ended, perhaps of a failure.
            if not self._ended.is_set():
                flight_recorder.dump_and_report(f"the store is lost: {error}")


_watch: Watch | None = None


def watch(store: Any) -> None:
    """Watches the store of the default group, if failed calls write files."""
    global _watch  # noqa: PLW0603 - there is one recorder in a process
    if flight_recorder.prefix() is None or _watch is not None:
        return
    _watch = Watch(store)
    flight_recorder.on_dump = _watch.tell
    # Whoever asks knows by this file that the rank is there.
    with contextlib.suppress(OSError, ValueError):
        flight_recorder.write_rank_record()


def unwatch() -> None:
    """The default group ends."""
    global _watch  # noqa: PLW0603 - there is one recorder in a process
    if _watch is not None:
        _watch.end()
    _watch, flight_recorder.on_dump = None, lambda: None


flight_recorder.describe = _describe
