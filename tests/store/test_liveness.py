"""Whether a run's writer still lives."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from comgra_decl.store import meta
from comgra_decl.store.meta import writer_alive, writer_identity


def test_this_process_lives_however_long_ago_it_committed() -> None:
    assert writer_alive(writer_identity(), last_commit=0.0)


def test_a_process_that_ended_does_not() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    identity = {**writer_identity(), "pid": ended.pid}
    assert not writer_alive(identity, last_commit=time.time())


def test_a_killed_process_that_nobody_waited_for_does_not() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    started = meta._process_start(child.pid)
    identity = {**writer_identity(), "pid": child.pid, "process_start": started}
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie
    assert not writer_alive(identity, last_commit=time.time())
    child.wait()


def test_another_process_with_the_same_number_is_not_the_writer() -> None:
    identity = {**writer_identity(), "process_start": "1"}
    assert not writer_alive(identity, last_commit=time.time())


def test_a_writer_elsewhere_is_judged_by_its_last_commit() -> None:
    identity = {**writer_identity(), "machine": "another one"}
    now = time.time()
    assert writer_alive(identity, last_commit=now - 10)
    assert not writer_alive(identity, last_commit=now - 3601)


def test_a_writer_that_says_nothing_of_itself_is_judged_by_its_last_commit() -> None:
    assert writer_alive({}, last_commit=time.time())
    assert not writer_alive({}, last_commit=0.0)
