"""The flight recorder: the last calls of this process, in the format of PyTorch's, for its reader ``torchfrtrace``.

::

    evenkeel.dump_flight_recorder("/tmp/evenkeel_rank_3")

Where ``EVENKEEL_FLIGHT_RECORDER`` is set, each failed operation writes a file: its value with the rank behind it. So it does where
``TORCH_FR_DUMP_TEMP_FILE`` or ``TORCH_NCCL_DEBUG_INFO_TEMP_FILE`` is, which torch's own recorder of NCCL's calls uses in the same way.

Beside these files are small ones in JSON, which ``kubectl evenkeel why`` reads.
"""

import contextlib
import json
import os
import pickle
import sys
import threading
from typing import Any

from evenkeel import _rank_record
from evenkeel._evenkeel import flight_record, on_failure, on_request, rank_record
from evenkeel._operation import operation_of

_VARIABLES = ("EVENKEEL_FLIGHT_RECORDER", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")

_VERSION = "2.10"
"""The version of the format, as of torch 2.14."""


def describe(_name: str) -> str:
    """The description of the group of a name. ``evenkeel.torch`` has another: torch gives a group its description after its name."""
    return "undefined"


def on_dump() -> None:
    """Called after a failed operation has written a file. ``evenkeel.torch`` has another, which has the other ranks write theirs."""


def prefix() -> str | None:
    """What the names of the files begin with; ``None`` if failed operations write none."""
    return next((value for value in map(os.environ.get, _VARIABLES) if value), None)


def dump_flight_recorder(path: str | os.PathLike[str] | None = None, *, rank: int | None = None) -> str:
    """Writes the last calls of this process, of all its groups, for ``torchfrtrace``. Returns the file's path.

    path: by default the value of EVENKEEL_FLIGHT_RECORDER, or of torch's variables, with the rank behind it.
    rank: this process's rank in the job, by default that in the first of its groups that exist. Of ranks that are threads of this process, the
        calls of this one are written.
    """
    record, rank = _read(rank)
    if path is None:
        if (start := prefix()) is None:
            raise ValueError(f"where to write the flight recorder to: give path=, or set {_VARIABLES[0]} to a path that the rank completes")
        path = f"{start}{rank}"
    path = os.fspath(path)
    _write(path, pickle.dumps(as_torch(record, rank)))
    return path


_is_written = False
"""Whether this process has written its record."""


def write_rank_record() -> str | None:
    """Writes what ``kubectl evenkeel why`` reads of this rank, and returns it; ``None`` if no files are wanted."""
    global _is_written  # noqa: PLW0603 - there is one recorder in a process
    if (start := prefix()) is None:
        return None
    if (own := rank_record(describe)) is None:
        raise ValueError("the flight recorder has no group: make a group first")
    rank, record = own
    _write(_rank_record.path_of(start, rank), record.encode())
    _is_written = True
    return record


def _read(rank: int | None = None) -> tuple[dict[str, Any], int]:
    """The last calls of this process, and its rank in the job, by default that in the first of its groups that exist."""
    record = json.loads(flight_record())
    if rank is None:
        if not record["groups"]:
            raise ValueError("the flight recorder has no group: give rank=, or make a group first")
        # Groups that are gone are listed as long as a call of theirs is kept, and the rank may have changed since.
        rank = _own(next((group for group in record["groups"] if group["is_open"]), record["groups"][0]))
    return record, rank


def _write(path: str, data: bytes) -> None:
    """Writes a file in one piece: a reader finds the old file or the new one, and takes the partial one for no rank's."""
    partial = os.path.join(os.path.dirname(path), f".evenkeel-{os.getpid()}-{threading.get_ident()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _own(group: dict[str, Any]) -> int:
    """This process's rank in the job."""
    return group["ranks"][group["rank"]]


def as_torch(record: dict[str, Any], rank: int) -> dict[str, Any]:
    """A flight record as torch's recorder has it, for the calls of this rank of the job."""
    groups = {group["id"]: group for group in record["groups"] if _own(group) == rank}
    configs: dict[str, dict[str, str]] = {}
    status: dict[str, dict[str, int]] = {}
    for group in groups.values():
        _configure(configs, group["name"] or group["id"], group, group["ranks"])
    entries = []
    for call in record["calls"]:
        group = groups.get(call["group"])
        if group is None or group["rank"] != call["rank"]:
            continue
        entry = _entry(call, group, configs)
        if entry is not None:
            entries.append(entry)
            _count(status.setdefault(entry["process_group"][0], {}), entry)
    return {
        "version": _VERSION,
        "pg_config": configs,
        "pg_status": status,
        "entries": entries,
        "evenkeel": {name: value for name, value in record.items() if name != "calls"},
    }


def _configure(configs: dict[str, dict[str, str]], name: str, group: dict[str, Any], ranks: list[int]) -> tuple[str, str]:
    """The name and description of a group, which is in `configs` afterwards."""
    if name not in configs:
        description = describe(group["name"]) if group["name"] else "undefined"
        configs[name] = {"name": name, "desc": description, "ranks": str(ranks)}
    return name, configs[name]["desc"]


def _count(status: dict[str, int], entry: dict[str, Any]) -> None:
    """The numbers of the last calls of a group."""
    reached = ["enqueued"]
    if entry["state"] != "scheduled":
        reached.append("started")
    if entry["state"] == "completed":
        reached.append("completed")
    for how in ("enqueued", "started", "completed"):
        status.setdefault(f"last_{how}_collective", -1)
    for how in reached:
        status[f"last_{how}_collective"] = entry["collective_seq_id"]


def _entry(call: dict[str, Any], group: dict[str, Any], configs: dict[str, dict[str, str]]) -> dict[str, Any] | None:
    """A call; ``None`` for one that torch's format has no place for: of unknown sizes, of an unknown number, or of an unknown sender."""
    known = operation_of(call)
    is_message = call["kind"] != "collective"
    if known is None or call["sequence"] is None or (is_message and call["peer"] is None):
        return None
    name, ranks, operation = group["name"] or group["id"], group["ranks"], known["name"]
    if is_message:
        # The reader matches a call within all ranks of its group, so the messages from one rank to another are a group of two.
        ends = (group["rank"], call["peer"])
        source, target = (ranks[end] for end in (ends if call["kind"] == "send" else ends[::-1]))
        name, pair = f"{name} {source}->{target}", sorted((source, target))
        process_group = _configure(configs, name, group, pair)
        source, target = pair.index(source), pair.index(target)
        operation = f"send {source}->{target}" if call["kind"] == "send" else f"recv {target}<-{source}"
    else:
        # Calls with different tags have no order.
        name = f"{name} tag {call['tag']}" if call["tag"] else name
        process_group = _configure(configs, name, group, ranks)
    number = call["sequence"] + 1 if is_message else call["sequence"]
    done = call["state"] == "completed"
    return {
        "record_id": call["record_id"],
        "pg_id": list(configs).index(name),
        "process_group": process_group,
        "collective_seq_id": number,
        "p2p_seq_id": number if is_message else 0,
        "op_id": call["record_id"],
        # The reader refuses the names of libraries that it does not know. All its versions know this one.
        "profiling_name": f"nccl:{operation}",
        "time_created_ns": call["created_ns"],
        "time_discovered_started_ns": call["started_ns"],
        "time_discovered_completed_ns": call["ended_ns"] if done else None,
        "duration_ms": (call["ended_ns"] - call["started_ns"]) / 1e6 if done else None,
        "input_sizes": known["input_sizes"],
        "input_dtypes": known["input_dtypes"],
        "output_sizes": known["output_sizes"],
        "output_dtypes": known["output_dtypes"],
        # To torch, a call that failed has begun and not completed.
        "state": "started" if call["state"] == "failed" else call["state"],
        "retired": call["ended_ns"] is not None,
        "timeout_ms": call["timeout_ms"],
        "is_p2p": is_message,
        "frames": [],
        "evenkeel": {name: call[name] for name in ("state", "failure", "tag", "peer", "note")},
    }


def _dump_after_failure(text: str) -> None:
    """Writes the file where one is wanted. The failed operation raises its own error whatever happens here."""
    if prefix() is not None:
        dump_and_report(text)
        on_dump()


def dump_and_report(reason: str) -> None:
    """Writes the files whose names the variables give, and says on stderr where they are, and why. Raises nothing.

    The rank's record is a line of stderr too: the log outlives the container, and its files do not.
    """
    line = ""
    try:
        text = f"wrote the flight recorder to {dump_flight_recorder()}: {reason}"
        if (record := write_rank_record()) is not None:
            line = _rank_record.log_line(record)
    except Exception as error:  # noqa: BLE001 - it is reported
        text = f"cannot write the flight recorder: {error}"
    # In one piece: other ranks may write to the same file.
    sys.stderr.write(f"evenkeel: {text}\n{line}")


def _answer_request(is_asked: bool) -> None:
    """Writes the files because somebody asks for them; else only the record, by which somebody knows that the rank is there. Raises nothing."""
    try:
        if is_asked or not _is_written:
            write_rank_record()
        if is_asked:
            dump_flight_recorder()
    except Exception as error:  # noqa: BLE001 - it is reported
        sys.stderr.write(f"evenkeel: cannot write the flight recorder: {error}\n")


on_failure(_dump_after_failure)
on_request(_answer_request)
