"""The record of a rank: the calls that it is in, small enough to be compared between all ranks of a job.

``kubectl evenkeel why`` reads it, from a file beside those of the flight recorder, or from the log of a process that has ended. It asks for
a new one by another file: a process that hangs still looks for that.
"""

import json
import os
import threading
from collections.abc import Callable
from typing import Any

from evenkeel._operation import operation_of

VERSION = 1
"""The version of the format."""

_INTERVAL = 1.0
"""Seconds between two looks at the file that asks for a record. `kubectl evenkeel why` waits a few times as long."""

_WAITING = 3
"""Calls in a row that have not completed, and are kept: the one that hangs, and the first that wait behind it."""

_MAX_LINE = 64 * 1024
"""The most bytes of a record in a log."""


def rank_record(record: dict[str, Any], rank: int, describe: Callable[[str], str]) -> dict[str, Any]:
    """A flight record as one rank of the job tells it: of each order of calls the last one that completed, and the first that did not."""
    groups = {group["id"]: group for group in record["groups"] if group["ranks"][group["rank"]] == rank}
    orders: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for call in record["calls"]:
        group = groups.get(call["group"])
        if group is None or group["rank"] != call["rank"] or call["sequence"] is None:
            continue
        peer = call["peer"] if call["kind"] != "collective" else None
        calls = orders.setdefault((call["group"], call["kind"], call["tag"], peer), [])
        if call["state"] == "completed":
            calls.clear()
        if len(calls) <= _WAITING:
            calls.append(call)
    return {
        "version": VERSION,
        "rank": rank,
        "process": record["process"],
        "time_ns": record["time_ns"],
        "groups": [_group(group, describe) for group in groups.values()],
        "calls": [_call(call) for calls in orders.values() for call in calls],
    }


def _group(group: dict[str, Any], describe: Callable[[str], str]) -> dict[str, Any]:
    name = group["name"] or ""
    description = describe(name) if name else "undefined"
    shown = name if description == "undefined" else description
    return {"id": group["id"], "name": shown, "rank": group["rank"], "ranks": group["ranks"], "waits_for": group["waits_for"]}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    known = operation_of(call)
    return {
        "group": call["group"],
        "kind": call["kind"],
        "tag": call["tag"],
        "peer": call["peer"],
        # As in the files for torch's reader, which counts messages from 1.
        "number": call["sequence"] + (call["kind"] != "collective"),
        "operation": known["name"] if known else "",
        "type": known["known_dtype"] if known else "",
        "input_bytes": call["input_bytes"],
        "output_bytes": call["output_bytes"],
        "state": call["state"],
        "created_ns": call["created_ns"],
        "started_ns": call["started_ns"] or 0,
        "ended_ns": call["ended_ns"] or 0,
        "failure": call["failure"]["message"] if call["failure"] else "",
    }


def path_of(prefix: str, rank: int) -> str:
    """The file of a rank's record, in the folder of the files for torch's reader, which takes it for none of these."""
    return os.path.join(os.path.dirname(prefix), f".evenkeel-record-{rank}.json")


def request_of(prefix: str) -> str:
    """The file that asks the processes that write to this folder for their records."""
    return os.path.join(os.path.dirname(prefix), ".evenkeel-request")


def encode(record: dict[str, Any]) -> str:
    """The record as one line."""
    return json.dumps(record, separators=(",", ":"))


def log_line(record: dict[str, Any]) -> str:
    """The line of a log that has the record, by which `kubectl evenkeel why` knows it; empty if it is too long for a log."""
    line = f"evenkeel: flight record: {encode(record)}\n"
    return line if len(line) <= _MAX_LINE else ""


class Requests:
    """Calls `answer` whenever the file that asks for records is made or changed. In a thread of its own: that which hangs does not answer,
    and the store may be lost."""

    def __init__(self, path: str, answer: Callable[[], None]) -> None:
        self._path, self._answer, self._ended = path, answer, threading.Event()
        self._seen = self._changed()
        self._thread = threading.Thread(target=self._run, name="evenkeel-requests", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()

    def _changed(self) -> int | None:
        try:
            return os.stat(self._path).st_mtime_ns
        except OSError:
            return None

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL):
            changed = self._changed()
            if changed is not None and changed != self._seen:
                # Before the answer: whoever asks again meanwhile gets another one.
                self._seen = changed
                self._answer()
