"""Signals that ask a training to end."""

import os
import signal
import subprocess
import sys

import pytest

from tests.paths import ROOT
from train.training.signals import Signals


class TestSignals:
    @pytest.fixture(autouse=True)
    def heeded(self):
        """Signals that the tests themselves may have been started without."""
        usual = {
            signal.SIGINT: signal.default_int_handler,
            signal.SIGTERM: signal.SIG_DFL,
            signal.SIGHUP: signal.SIG_DFL,
        }
        before = {number: signal.signal(number, handler) for number, handler in usual.items()}
        yield
        for number, handler in before.items():
            signal.signal(number, handler)

    def test_handlers_are_put_back_and_ignored_ones_stay_ignored(self):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.getsignal(n) for n in numbers]
        with Signals() as signals:
            assert all(signal.getsignal(n) not in before for n in numbers[:2])
            signal.raise_signal(signal.SIGHUP)
            assert signals.received == 0
        assert [signal.getsignal(n) for n in numbers] == before

    def test_the_first_is_remembered_and_the_second_acts(self, monkeypatch):
        # Read as a pipe, which waits: to look again and again loses what comes between two looks.
        read, write = os.pipe()
        with open(read) as heard:
            with open(write, "w", buffering=1) as said:
                monkeypatch.setattr(sys, "stderr", said)
                with Signals(lambda: "saving", lambda: "gone") as signals:
                    assert signals.received == 0
                    signal.raise_signal(signal.SIGTERM)
                    assert heard.readline() == "saving\n"
                    assert signals.received == signal.SIGTERM
                    with pytest.raises(KeyboardInterrupt):
                        signal.raise_signal(signal.SIGINT)
                monkeypatch.undo()
            assert "gone" not in heard.read()


BUSY = """
import hashlib
import signal
from train.training import signals
# A shell ignores SIGINT for what it runs in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
signals.PATIENCE = 0.2
with signals.Signals(lambda: "saving", lambda: "abandoned"):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)
"""


def test_a_process_inside_a_call_of_c_answers_at_once():
    """No handler of Python's is called while the main thread is in there."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "saving\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "abandoned\n"
        assert process.wait(120) == 128 + signal.SIGINT
    finally:
        process.kill()
