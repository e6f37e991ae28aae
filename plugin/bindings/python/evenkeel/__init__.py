"""Collective operations between processes, for numpy arrays and tensors on the CPU; and the network plugin for NCCL.

Start a program as several ranks with a launcher (``evenkeel-run -n 4 python train.py``, torchrun, mpirun, srun)::

    import evenkeel, numpy

    with evenkeel.init() as group:
        gradients = numpy.full(1000, group.rank, numpy.float32)
        group.allreduce(gradients)

``evenkeel-run COMMAND`` enables the plugin for every program that uses NCCL.
"""

from evenkeel._evenkeel import Group, MemoryStore, Request, StoreServer, __version__, init, join_as_newcomer
from evenkeel.errors import AbortedError, Error, LostError, MismatchError, StoreError, TimeoutError
from evenkeel.flight_recorder import dump_flight_recorder
from evenkeel.run import plugin_path

__all__ = [
    "AbortedError",
    "Error",
    "Group",
    "LostError",
    "MemoryStore",
    "MismatchError",
    "Request",
    "StoreError",
    "StoreServer",
    "TimeoutError",
    "__version__",
    "dump_flight_recorder",
    "init",
    "join_as_newcomer",
    "plugin_path",
]
