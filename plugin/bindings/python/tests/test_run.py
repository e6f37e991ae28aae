"""Tests of evenkeel-run, as a user calls it. Without NCCL: the tests load the plugin as NCCL does, and its logs are made up."""

import os
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import evenkeel
from ranks import RUN

from evenkeel.run import plugin_environment, report

LOAD_PLUGIN = """
import ctypes, os
# As NCCL does: by path, or by name in the path of the loader.
name = os.environ["NCCL_NET_PLUGIN"]
library = ctypes.CDLL(name if "/" in name else f"lib{os.environ.get('LIBRARY', 'nccl')}-net-{name}.so")
class Table(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("init", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p))]
table = Table.in_dll(library, "ncclNetPlugin_v8")
assert table.name == b"Evenkeel" and table.init(None) == 0
"""
WRITE_LOG = """
import os
path = os.environ["NCCL_DEBUG_FILE"].replace("%h", "host").replace("%p", str(os.getpid()))
open(path, "w").write({log!r})
"""


def run(*command, **environment):
    without = {"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_NET_PLUGIN", "RANK", "WORLD_SIZE"}
    given = {name: value for name, value in os.environ.items() if name not in without}
    return subprocess.run(
        [RUN, *command], env=given | {"NCCL_SOCKET_IFNAME": "lo"} | environment, capture_output=True, text=True, timeout=60
    )


class Commands(unittest.TestCase):
    def test_report_names_processes_with_the_plugin(self):
        # RCCL before 2.21 looks for another file, and takes a path later, as NCCL does.
        for options, nccl in (([], "nccl"), (["--old-nccl"], "nccl"), (["--old-nccl"], "rccl")):
            ran = run(*options, sys.executable, "-c", LOAD_PLUGIN + "print('output')", LIBRARY=nccl)
            self.assertEqual((ran.returncode, ran.stdout), (0, "output\n"), ran.stderr)
            self.assertRegex(ran.stderr, r"^evenkeel-run: NCCL loaded Evenkeel in process \d+: version \d.*devices: lo")
            self.assertEqual(len(ran.stderr.splitlines()), 1)

    def test_report_without_nccl(self):
        ran = run("true")
        self.assertEqual((ran.returncode, ran.stdout), (0, ""))
        self.assertRegex(ran.stderr, "no process of this command used NCCL")
        self.assertRegex(run("true", NCCL_DEBUG="WARN").stderr, "NCCL_DEBUG was set")

    def test_report_explains_why_the_plugin_was_not_loaded(self):
        log = (
            "host:5:5 [0] NCCL INFO NET/Plugin: Could not find: /x.so\n"
            "host:5:5 [0] NCCL INFO Using network Socket\n"
        )
        ran = run(sys.executable, "-c", WRITE_LOG.format(log=log))
        self.assertRegex(ran.stderr, r"did NOT load Evenkeel in process \d+: it used Socket; NET/Plugin: Could not find: /x.so")
        ran = run(sys.executable, "-c", WRITE_LOG.format(log=log), NCCL_NET="Socket")
        self.assertRegex(ran.stderr, "NCCL_NET=Socket asks for that")
        ran = run(sys.executable, "-c", WRITE_LOG.format(log="NCCL version 2.19.3+cuda12.1\n" + log))
        self.assertRegex(ran.stderr, "NCCL 2.19, which needs evenkeel-run --old-nccl")

    def test_watch_tells_whom_ranks_wait_for_and_keeps_the_picture(self):
        # The program does what a rank does that has judged. It goes on until its sentence is told.
        verdict = '{"suspects": [{"class": "late", "host": "n3", "rank": 5}], "text": "7 of 8 ranks wait for rank 5 on n3"}'
        killed = '{"suspects": [{"class": "late", "host": "n9", "rank": 9}], "text": "7 of 8 ranks wait for rank 9 on n9"}'
        program = (
            "import os, pathlib, time\nfolder = pathlib.Path(os.environ['EVENKEEL_STATUS_DIR'])\n"
            "its = f'verdict.{os.getpid()}'\n"
            f"(folder / f'{{its}}.a').write_text({verdict!r})\n(folder / f'{{its}}.b').write_text('no JSON')\n"
            f"(folder / f'{{its}}.c').write_text({verdict!r})\n(folder / 'timeline.a.svg').write_text('<svg/>')\n"
            f"(folder / 'verdict.{2**30}.d').write_text({killed!r})\n(folder / 'timeline.b.svg').write_text('')\n"
            "input()\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            picture = Path(folder) / "job.svg"
            command = [RUN, "--watch", "--timeline", str(picture), sys.executable, "-c", program]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
                try:
                    self.assertEqual(ran.stderr.readline(), "evenkeel-run: 7 of 8 ranks wait for rank 5 on n3\n")
                    _, rest = ran.communicate("\n", timeout=60)
                finally:
                    ran.kill()
            self.assertEqual(ran.returncode, 0, rest)
            self.assertNotIn("wait for rank", rest, "two processes say the same, and the third is gone")
            self.assertEqual(picture.read_text(), "<svg/>")

    def test_watch_without_a_picture_says_where_it_is(self):
        with tempfile.TemporaryDirectory() as folder:
            ran = run("--watch", "--timeline", folder + "/none.svg", "true")
            self.assertEqual(ran.returncode, 0)
            self.assertRegex(ran.stderr, "no picture for --timeline .*lowest rank")

    def test_status_and_signals_pass_through(self):
        self.assertEqual(run("sh", "-c", "exit 7").returncode, 7)
        self.assertEqual(run("sh", "-c", "kill -KILL $$").returncode, 128 + 9)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            program = (
                f"import signal, sys, time\nsignal.signal({int(number)}, lambda *_: sys.exit(3))\n"
                # A signal just before one long sleep would be handled after it.
                "print('ready', flush=True)\nwhile True: time.sleep(0.05)"
            )
            command = [RUN, sys.executable, "-c", program]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as ran:
                try:
                    ran.stdout.readline()
                    ran.send_signal(number)
                    ran.communicate(timeout=30)
                finally:
                    ran.kill()
            self.assertEqual(ran.returncode, 3, number)

    def test_invalid_command_lines_are_one_line_errors(self):
        for arguments, says, status in [
            ([], "no command", 2),
            (["-n", "0", "true"], "1 to 128", 2),
            (["/no/such/program"], "cannot run /no/such/program: No such file", 127),
            (["-n", "2", "/etc/passwd"], "cannot run /etc/passwd: Permission denied", 126),
        ]:
            ran = run(*arguments)
            self.assertEqual(ran.returncode, status)
            self.assertIn(says, ran.stderr.splitlines()[-1])

    def test_plugin_path_is_printed(self):
        ran = run("--plugin-path")
        self.assertEqual(ran.stdout, evenkeel.plugin_path() + "\n")
        self.assertTrue(os.path.isabs(evenkeel.plugin_path()) and os.path.exists(evenkeel.plugin_path()))

    def test_users_environment_is_kept_or_reported(self):
        given = {"NCCL_DEBUG": "WARN", "LD_LIBRARY_PATH": "/a", "X": "y"}
        made = plugin_environment(given, "/tmp/x", old_nccl=True)
        self.assertEqual((made["NCCL_DEBUG"], made["X"]), ("WARN", "y"))
        self.assertNotIn("NCCL_DEBUG_FILE", made)
        self.assertEqual(made["NCCL_NET_PLUGIN_REF_COUNT"], "1")
        self.assertEqual(plugin_environment(made | {"NCCL_NET_PLUGIN_REF_COUNT": "0"}, "/tmp/x", old_nccl=True)["NCCL_NET_PLUGIN_REF_COUNT"], "0")
        self.assertEqual(made["LD_LIBRARY_PATH"], f"{os.path.dirname(evenkeel.plugin_path())}:/a")
        ran = run("true", NCCL_NET_PLUGIN="other")
        self.assertIn("NCCL_NET_PLUGIN was 'other'", ran.stderr)

    def test_report_reads_networks_and_channels_from_logs(self):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "plugin.12").write_text("version 1, devices: eth0\n")
            Path(folder, "plugin.13").write_text("version 1, devices: eth0\n")
            channel = "Channel 00/0 : 0[0] -> 1[0] [send] via NET/Evenkeel/0\n"
            Path(folder, "nccl.host.12").write_text("Using network Evenkeel\n" + 2 * channel)
            Path(folder, "nccl.host.13").write_text("Using network IB\n")
            lines = report(Path(folder), {}, old_nccl=False)
        self.assertEqual(
            lines,
            [
                "NCCL loaded Evenkeel in 2 processes (12, 13): version 1, devices: eth0",
                "2 channels to or from other hosts go through it",
                "but NCCL used IB in process 13",
            ],
        )


class Ranks(unittest.TestCase):
    """Ranks share their output. Each writes its line in one call, which ``print`` does not when Python does not buffer."""

    def test_ranks_join_through_the_served_store(self):
        program = (
            "import evenkeel, numpy, os, sys\n"
            "for name in ('a', 'b', 'a'):\n"
            "    with evenkeel.init(name=name) as group:\n"
            "        group.allreduce(x := numpy.ones(3) * group.rank)\n"
            "sys.stdout.write(f\"{group.rank} {os.environ['LOCAL_RANK']} {x}\\n\")\n"
        )
        ran = run("-n", "3", sys.executable, "-c", program)
        self.assertEqual((ran.returncode, ran.stderr), (0, ""))
        self.assertEqual(sorted(ran.stdout.splitlines()), [f"{rank} {rank} [3. 3. 3.]" for rank in range(3)])

    def test_ranks_join_at_the_master_port(self):
        program = (
            "import evenkeel, numpy, os\n"
            "del os.environ['EVENKEEL_STORE']\n"
            "with evenkeel.init() as group: group.barrier()\n"
        )
        ran = run("-n", "2", sys.executable, "-c", program)
        self.assertEqual((ran.returncode, ran.stderr), (0, ""))

    def test_first_failure_is_the_exit_status(self):
        program = (
            "import evenkeel, numpy, sys\n"
            "group = evenkeel.init()\n"
            "if group.rank == 1: sys.exit(5)\n"
            "try: group.barrier()\n"
            "except evenkeel.LostError as error: sys.stdout.write(f'{error.ranks}\\n')\n"
        )
        ran = run("-n", "3", sys.executable, "-c", program)
        self.assertEqual(ran.returncode, 5)
        self.assertEqual(ran.stdout, "(1,)\n(1,)\n")
        self.assertIn("evenkeel-run: rank 1 ended with status 5", ran.stderr)

    def test_ranks_exit_with_evenkeel_run(self):
        program = "import os, sys, time\nsys.stdout.write(f'{os.getpid()}\\n'), sys.stdout.flush()\ntime.sleep(600)"
        with subprocess.Popen([RUN, "-n", "2", sys.executable, "-c", program], stdout=subprocess.PIPE) as ran:
            try:
                ranks = [int(ran.stdout.readline()) for _ in range(2)]
            finally:
                ran.kill()
            ran.wait()
            # The output ends when both ranks have closed it.
            self.assertEqual(ran.stdout.read(), b"")
        self.assertEqual(len(set(ranks)), 2)


if __name__ == "__main__":
    unittest.main()
