"""What torch calls the operation of a call, and its sizes: from the note of a call of ``evenkeel.torch``, else from the call itself."""

import json
import re
from typing import Any

_NAMES = {
    "allreduce": "all_reduce",
    "reduce_scatter": "reduce_scatter_v",
    "allgather": "all_gather_v",
    "alltoall": "all_to_all",
}
"""Torch's names of operations that have another one here. The parts of the ranks may differ in size."""


def operation_of(call: dict[str, Any]) -> dict[str, Any] | None:
    """The name, sizes and types of a recorded call; ``None`` where nobody knows its sizes, as it has not begun."""
    return _from_note(call["note"]) or _from_sizes(call)


def torch_note(name: str, inputs: list[list[int]], outputs: list[list[int]], dtype: str) -> str:
    """The note of a call of ``evenkeel.torch``: torch's name of it, and the shapes of its tensors."""
    return f'{{"torch":"{name}","inputs":{inputs},"outputs":{outputs},"dtype":"{dtype}"}}'


def _from_note(note: str | None) -> dict[str, Any] | None:
    if note is None or not note.startswith('{"torch":'):
        return None
    known = json.loads(note)
    return {
        "name": known["torch"],
        "input_sizes": known["inputs"],
        "input_dtypes": [known["dtype"]] * len(known["inputs"]),
        "output_sizes": known["outputs"],
        "output_dtypes": [known["dtype"]] * len(known["outputs"]),
    }


def _from_sizes(call: dict[str, Any]) -> dict[str, Any] | None:
    """Name and sizes of a call of which torch knows nothing. Where the type is unknown, elements are bytes."""
    if call["started_ns"] is None:
        return None
    dtype = call["data_type"] or "uint8"
    item = int(re.search(r"\d+", dtype)[0]) // 8
    name, taken, given = _NAMES.get(call["name"], call["name"]), call["input_bytes"] // item, call["output_bytes"] // item
    if name.endswith("_v"):
        # The reader compares sizes between ranks, and these have the sum in common.
        taken = given = max(taken, given)
    return {
        "name": name,
        "input_sizes": [[taken]],
        "input_dtypes": [dtype],
        "output_sizes": [[given]],
        "output_dtypes": [dtype],
    }
