"""Signals are read from a queue, in a process of its own: handlers belong to the whole process."""

from __future__ import annotations

import subprocess
import sys

BEFORE = """
import os, signal, threading, time
from dra.plugin.signals import SignalQueue, end_process
signals = SignalQueue()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEFORE + program], capture_output=True, text=True, timeout=20, check=False
    )


def test_signals_are_given_in_the_order_in_which_they_came():
    done = run("""
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    os.kill(os.getpid(), number)
print([signal.Signals(signals.wait(5)).name for _ in range(3)], signals.wait(0))
""")
    assert done.stdout == "['SIGUSR1', 'SIGTERM', 'SIGINT'] None\n", done.stderr


def test_a_signal_that_another_thread_gets_is_given_to_who_waits():
    done = run("""
other = threading.Thread(target=lambda: (time.sleep(0.05), signal.pthread_kill(threading.get_ident(), signal.SIGTERM)))
other.start()
print(signals.wait(10) == signal.SIGTERM)
""")
    assert done.stdout == "True\n", done.stderr


def test_a_signal_while_the_logs_lock_is_held_waits_for_nothing():
    done = run("""
from dra.telemetry import log
log.configure(level="debug")
from dra.telemetry.log import _Lines
with _Lines._lock:
    os.kill(os.getpid(), signal.SIGTERM)
    print(signals.wait(5) == signal.SIGTERM)
log.get_logger().info("still_there")
""")
    assert done.stdout == "True\n", done.stderr
    assert "still_there" in done.stderr


def test_a_flood_of_signals_loses_some_and_stops_nobody():
    done = run("""
for _ in range(70_000):
    signal.raise_signal(signal.SIGTERM)
signals.wake()
print(signals.wait(5) == signal.SIGTERM)
""")
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_children_get_signals_as_usual():
    done = run("""
import subprocess
child = subprocess.Popen(["sleep", "20"])
child.terminate()
print(child.wait(5))
""")
    assert done.stdout == "-15\n", done.stderr


def test_the_process_ends_with_its_status_and_its_output_whatever_its_threads_do():
    done = run("""
print("said")
threading.Thread(target=threading.Event().wait).start()
end_process(3)
""")
    assert (done.returncode, done.stdout) == (3, "said\n")
