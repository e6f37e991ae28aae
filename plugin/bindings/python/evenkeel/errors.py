"""The exceptions that operations raise. Invalid arguments raise ``ValueError`` or ``TypeError`` instead; nothing was done then."""

import builtins


class Error(RuntimeError):
    """An operation failed. This class itself is raised when a local system call failed."""

    ranks: tuple[int, ...] = ()
    """The ranks that caused it, as far as known, numbered as in the group that was used."""

    group_usable: bool = True
    """Whether the group is still usable. If not, every later call raises the error that ended it: make another group."""


class TimeoutError(Error, builtins.TimeoutError):
    """Nothing moved for the whole timeout, although every process that was probed is alive."""


class LostError(Error):
    """A rank's process has exited, does not respond or cannot be reached."""


class AbortedError(Error):
    """A rank aborted the group."""


class StoreError(Error):
    """The store in which the ranks find each other cannot be used."""


class MismatchError(Error):
    """The ranks called different operations, or passed different counts."""
