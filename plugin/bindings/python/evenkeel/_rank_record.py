"""The record of a rank: the calls that it is in, small enough to be compared between all ranks of a job.

``kubectl evenkeel why`` reads it, from a file beside those of the flight recorder, or from the log of a process that has ended. It asks for
a new one by another file: a process that hangs still looks for that.
"""

import os

_MAX_LINE = 64 * 1024
"""The most bytes of a record in a log."""


def path_of(prefix: str, rank: int) -> str:
    """The file of a rank's record, in the folder of the files for torch's reader, which takes it for none of these."""
    return os.path.join(os.path.dirname(prefix), f".evenkeel-record-{rank}.json")


def log_line(record: str) -> str:
    """The line of a log that has the record, by which `kubectl evenkeel why` knows it; empty if it is too long for a log."""
    line = f"evenkeel: flight record: {record}\n"
    return line if len(line) <= _MAX_LINE else ""
