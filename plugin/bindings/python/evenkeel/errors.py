"""What operations raise. Wrong arguments raise ``ValueError`` or ``TypeError`` instead, and nothing was done then."""

import builtins


class Error(Exception):
    """An operation failed. Raised itself where a local system call failed."""

    ranks: tuple[int, ...] = ()
    """The ranks that caused it, as far as that is known, in the numbers of the group that was used."""

    group_usable: bool = True
    """Whether the group can be used on. If not, every later call raises the error that ended it: make another group."""


class TimeoutError(Error, builtins.TimeoutError):
    """Nothing happened for as long as was allowed, though every process that was asked is alive."""


class LostError(Error):
    """A rank's process has ended, stands still or cannot be reached."""


class AbortedError(Error):
    """Somebody aborted the group."""


class StoreError(Error):
    """The store in which the ranks meet cannot be used."""


class MismatchError(Error):
    """Ranks disagree on what they do."""
