"""Runs the tests of the present folder, and writes an event for each test to file descriptor 3, as a line of JSON."""

import json
import os
import sys
import time
import traceback
import unittest

os.set_inheritable(3, False)
events = os.fdopen(3, "w", encoding="utf-8")


def write(**event):
    events.write(json.dumps(event) + "\n")
    events.flush()


class Events(unittest.TestResult):
    """One event for each test, with the failures of its subtests in it."""

    def startTest(self, test):
        super().startTest(test)
        self.began = time.monotonic()
        self.outcome, self.reason, self.output = "passed", "", ""
        write(event="start", test=test.id())

    def stopTest(self, test):
        super().stopTest(test)
        self.write_stop(test, time.monotonic() - self.began)
        self.outcome = None

    outcome = None

    def write_stop(self, test, seconds):
        write(event="stop", test=test.id(), outcome=self.outcome, seconds=seconds, reason=self.reason, output=self.output)

    def end_as(self, test, outcome, reason="", output=""):
        outside = self.outcome is None  # of a class or a module, in its set-up
        if outside:
            self.outcome, self.reason, self.output = outcome, reason, output
            self.write_stop(test, 0)
            self.outcome = None
            return
        if self.outcome != "failed":
            self.outcome, self.reason = outcome, reason
        self.output += output

    def addError(self, test, error):
        super().addError(test, error)
        self.end_as(test, "failed", output="".join(traceback.format_exception(*error)))

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.end_as(test, "failed", output="".join(traceback.format_exception(*error)))

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.end_as(test, "failed", output=f"{subtest.id()}\n" + "".join(traceback.format_exception(*error)))

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.end_as(test, "skipped", reason=reason)

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.end_as(test, "failed", output="the test is expected to fail, and passed\n")


result = Events()
unittest.defaultTestLoader.discover(".").run(result)
write(event="end")
sys.exit(0 if result.wasSuccessful() else 1)
