"""``evenkeel-run COMMAND``: runs a command with Evenkeel enabled for NCCL, and reports afterwards whether NCCL used it."""

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from evenkeel._evenkeel import StoreServer

_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_SI_KERNEL = 0x80
"""``si_code`` of a signal from a terminal, which its whole foreground process group gets."""
_GRACE = 10.0
"""Seconds for the other ranks to exit by themselves once one has failed, and then to obey SIGTERM."""
_MAX_RANKS = 128
_PR_SET_PDEATHSIG = 1


def plugin_path() -> str:
    """The absolute path of the NCCL plugin in this package, for ``NCCL_NET_PLUGIN``."""
    return str(Path(__file__).resolve().parent / "lib" / "libnccl-net-evenkeel.so")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="evenkeel-run",
        usage="%(prog)s [-n N] [--watch] [--timeline FILE] [--old-nccl] COMMAND...",
        description="Runs a command with Evenkeel as NCCL's network, and reports afterwards whether NCCL used it.",
        epilog="examples: evenkeel-run torchrun --nproc-per-node 8 train.py    "
        "mpirun -np 16 evenkeel-run all_reduce_perf -b 8 -e 1G    evenkeel-run -n 4 python train.py",
    )
    parser.add_argument("-n", type=int, dest="ranks", metavar="N", help="start the command as N ranks on this host")
    parser.add_argument("--old-nccl", action="store_true", help="for NCCL before 2.21, and RCCL likewise, which find plugins by name only")
    parser.add_argument("--watch", action="store_true", help="say, while the command runs, which rank, card or path its ranks wait for")
    parser.add_argument("--timeline", metavar="FILE", help="write a picture of who waited for what, when: an SVG file, from the host of the lowest rank")
    parser.add_argument("--plugin-path", action="store_true", help="print the path of the plugin and do nothing else")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    options = parser.parse_args(arguments)
    if options.plugin_path:
        print(plugin_path())
        return 0
    if not options.command:
        parser.error("no command given")
    if options.ranks is not None and not 1 <= options.ranks <= _MAX_RANKS:
        parser.error(f"-n {options.ranks}: 1 to {_MAX_RANKS}")
    if not os.path.exists(plugin_path()):
        parser.error(f"{plugin_path()} is missing: this package was built without the plugin; `make wheel` builds the package with it")

    # Signals from now on stay pending until sigtimedwait takes them, and are forwarded.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED | {signal.SIGCHLD})
    with tempfile.TemporaryDirectory(prefix="evenkeel-run-") as folder:
        environment = plugin_environment(os.environ, folder, options.old_nccl)
        verdicts = Verdicts(Path(folder))
        if options.watch or options.timeline:
            environment["EVENKEEL_WATCH"] = "on"
        meanwhile = verdicts.tell_changes if options.watch else lambda: None
        try:
            if options.ranks is None:
                status = _wait([_start(options.command, environment, signal.SIGTERM)], meanwhile)
            else:
                status = _run_ranks(options.ranks, options.command, environment, meanwhile)
        except OSError as error:
            _log(f"cannot run {options.command[0]}: {error.strerror}")
            return 127 if isinstance(error, FileNotFoundError) else 126
        if options.timeline:
            verdicts.keep_timeline(options.timeline)
        found = report(Path(folder), environment, options.old_nccl)
        if found or options.ranks is None:
            for line in found or [_unused(environment, folder)]:
                _log(line)
    return status


def plugin_environment(given: Mapping[str, str], folder: str, old_nccl: bool) -> dict[str, str]:
    """The environment for a command: enables the plugin, and sets a folder for its status files and NCCL's logs."""
    environment = dict(given)
    before = given.get("NCCL_NET_PLUGIN")
    if old_nccl:
        # It converts a name to libnccl-net-NAME.so, or RCCL to librccl-net-NAME.so, and loads that from the loader's path.
        environment["NCCL_NET_PLUGIN"] = "evenkeel"
        places = [os.path.dirname(plugin_path()), given.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = ":".join(place for place in places if place)
    else:
        environment["NCCL_NET_PLUGIN"] = plugin_path()
    if before and before != environment["NCCL_NET_PLUGIN"]:
        _log(f"NCCL_NET_PLUGIN was {before!r}; for this command it is Evenkeel's")
    # NCCL 2.28 and 2.29 forget the plugin's name when a process's last communicator is destroyed, unless it stays loaded.
    environment.setdefault("NCCL_NET_PLUGIN_REF_COUNT", "1")
    environment["EVENKEEL_STATUS_DIR"] = folder
    if not given.get("NCCL_DEBUG") and not given.get("NCCL_DEBUG_FILE"):
        # The user loses nothing: without NCCL_DEBUG NCCL logs nothing.
        environment["NCCL_DEBUG"] = "INFO"
        environment["NCCL_DEBUG_FILE"] = os.path.join(folder, "nccl.%h.%p")
    return environment


class Verdicts:
    """What the processes of this host have found out about whom the job waits for, from their files in the status folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._told: set[str] = set()

    def tell_changes(self) -> None:
        """Logs what is new since the last call."""
        texts = self._texts()
        for text in sorted(texts.keys() - self._told):
            _log(texts[text])
        if self._told and not texts:
            _log("its ranks no longer wait for anybody in particular")
        self._told = set(texts)

    def _texts(self) -> dict[str, str]:
        """The sentences about suspects, by what they are about: figures change all the time."""
        texts = {}
        for path in self._folder.glob("verdict.*"):
            if not _is_alive(path.name.split(".")[1]):
                continue  # it was killed: it waits for nobody
            try:
                verdict = json.loads(path.read_text())
                suspects = [(its["class"], its["host"], its.get("rank")) for its in verdict["suspects"]]
                if suspects:
                    texts[repr(sorted(map(repr, suspects)))] = str(verdict["text"])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # such as a file of another version
        return texts

    def keep_timeline(self, file: str) -> None:
        """Copies the picture of the job, if the process that draws it is on this host."""
        # Several processes may have collected, one after the other, or each for a part of the job: the picture of the most is kept.
        pictures = sorted(self._folder.glob("timeline.*.svg"), key=lambda path: path.stat().st_size)
        if not pictures:
            _log(f"no picture for --timeline {file}: the process that draws it is on the host of the lowest rank, and begins after some seconds")
            return
        try:
            shutil.copyfile(pictures[-1], file)
        except OSError as error:
            _log(f"--timeline {file}: {error.strerror}")


def _is_alive(process: str) -> bool:
    return not process.isdecimal() or Path("/proc", process).exists()


def report(folder: Path, environment: Mapping[str, str], old_nccl: bool) -> list[str]:
    """Lines that report in which processes of this host NCCL used the plugin, and why not in others. Empty if no process used NCCL."""
    loaded = {int(path.name.removeprefix("plugin.")): path.read_text().strip() for path in folder.glob("plugin.*")}
    logs = {}
    for path in folder.glob("nccl.*"):
        process = path.name.rpartition(".")[2]
        if process.isdecimal():
            logs[int(process)] = path.read_text(errors="replace")
    lines = []
    for status in sorted(set(loaded.values())):
        processes = [process for process, its in loaded.items() if its == status]
        lines.append(f"NCCL loaded Evenkeel in {_processes(processes)}: {status}")
    channels = sum(len(re.findall(r"via NET/Evenkeel/", log)) for log in logs.values())
    if channels:
        lines.append(f"{channels} channels to or from other hosts go through it")
    for process in sorted(loaded.keys() & logs.keys()):
        network = _last(r"Using network (\S+)", logs[process])
        if network and network.lower() != "evenkeel":
            lines.append(f"but NCCL used {network} in process {process}{_hint(environment)}")
    without: dict[str, list[int]] = {}
    for process in logs.keys() - loaded.keys():
        without.setdefault(_why(logs[process], environment, old_nccl), []).append(process)
    for why, processes in sorted(without.items()):
        lines.append(f"NCCL did NOT load Evenkeel in {_processes(processes)}: {why}")
    return lines


def _why(log: str, environment: Mapping[str, str], old_nccl: bool) -> str:
    network = _last(r"Using network (\S+)", log)
    why = f"it used {network}" if network else "it exited before it chose a network"
    version = re.search(r"NCCL version (\d+)\.(\d+)", log)
    if version and (int(version[1]), int(version[2])) < (2, 21) and not old_nccl:
        return f"{why}; it is NCCL {version[1]}.{version[2]}, which needs evenkeel-run --old-nccl"
    reason = _last(r"(NET/Plugin\s*:.*(?:[Ff]ail|not find|cannot open|No plugin|returned).*)", log) or _last(r"(NCCL WARN .*)", log)
    return why + (f"; {reason.strip()}" if reason else "") + _hint(environment)


def _hint(environment: Mapping[str, str]) -> str:
    wanted = environment.get("NCCL_NET", "")
    return f"; NCCL_NET={wanted} asks for that: unset it" if wanted.lower() not in ("", "evenkeel") else ""


def _unused(environment: Mapping[str, str], folder: str) -> str:
    if environment.get("NCCL_DEBUG_FILE", "").startswith(folder):
        return "no process of this command used NCCL on this host: it ran on CPUs, or exited before it communicated"
    return "NCCL did not load Evenkeel in any process on this host; NCCL_DEBUG was set, so see that log for whether NCCL was used at all"


def _last(pattern: str, text: str) -> str | None:
    found = re.findall(pattern, text)
    return found[-1] if found else None


def _processes(processes: Iterable[int]) -> str:
    numbers = sorted(processes)
    return f"process {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} processes ({', '.join(map(str, numbers))})"


def _run_ranks(count: int, command: list[str], environment: dict[str, str], meanwhile: Callable[[], None]) -> int:
    with StoreServer() as store:
        common = {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "EVENKEEL_STORE": store.address,
        }
        # All ranks are on this host, so the loopback interface always works.
        common["NCCL_SOCKET_IFNAME"] = environment.get("NCCL_SOCKET_IFNAME") or "lo"
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(count):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(_start(command, environment | common | own, signal.SIGKILL))
            return _wait(ranks, meanwhile)
        finally:
            for child in ranks:
                child.kill()
                child.wait()


def _start(command: list[str], environment: dict[str, str], when_orphaned: signal.Signals) -> "subprocess.Popen[bytes]":
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED | {signal.SIGCHLD})
        prctl(_PR_SET_PDEATHSIG, int(when_orphaned), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(command, env=environment, preexec_fn=in_child)


def _wait(ranks: list["subprocess.Popen[bytes]"], meanwhile: Callable[[], None]) -> int:
    """Waits for all ranks and forwards signals to them. Calls ``meanwhile`` about once a second. Returns the status of the first failure. The others get a while to notice it."""
    running = dict(enumerate(ranks))
    first, deadline, next_signal = 0, None, signal.SIGTERM
    while running:
        for rank, child in list(running.items()):
            if child.poll() is None:
                continue
            del running[rank]
            status = child.returncode if child.returncode >= 0 else 128 - child.returncode
            if status and len(ranks) > 1:
                ended = f"with status {status}" if child.returncode > 0 else f"by signal {-child.returncode}"
                _log(f"rank {rank} ended {ended}")
            if status and not first:
                first, deadline = status, time.monotonic() + _GRACE
        if deadline is not None and time.monotonic() > deadline:
            for child in running.values():
                child.send_signal(next_signal)
            deadline, next_signal = time.monotonic() + _GRACE, signal.SIGKILL
        if not running:
            break
        meanwhile()
        received = signal.sigtimedwait(_FORWARDED | {signal.SIGCHLD}, 1.0)
        # Signals from a terminal have already reached the command.
        if received is not None and received.si_signo != signal.SIGCHLD and received.si_code != _SI_KERNEL:
            for child in running.values():
                child.send_signal(received.si_signo)
    return first


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _log(line: str) -> None:
    print(f"evenkeel-run: {line}", file=sys.stderr, flush=True)
