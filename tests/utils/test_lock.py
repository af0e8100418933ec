"""One job per folder: a living job is named, and a dead one never blocks."""

import errno
import fcntl
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from padded_dispatch.utils import lock
from padded_dispatch.utils.lock import NAME, only_job


def test_a_second_job_is_refused_and_the_first_is_named(tmp_path):
    folder = tmp_path / "new" / "run"
    with only_job("--run-dir", folder):
        message = (
            rf"^--run-dir must be used by one job at a time; process {os.getpid()} on \S+ \(.*\) "
            rf"is using it, got '{folder}'; wait for its end, or choose another folder$"
        )
        with pytest.raises(ValueError, match=message), only_job("--run-dir", folder):
            pass
        # The refusal took nothing away from the first.
        assert json.loads((folder / NAME).read_text())["pid"] == os.getpid()
    assert [path.name for path in folder.iterdir()] == [NAME]
    assert (folder / NAME).read_text() == ""
    with only_job("--run-dir", folder):
        pass


def test_of_many_jobs_that_start_at_once_one_gets_the_folder(tmp_path):
    num_jobs = 16
    start, end = threading.Barrier(num_jobs), threading.Barrier(num_jobs)

    def job() -> bool:
        start.wait()
        try:
            with only_job("--run-dir", tmp_path):
                end.wait()
                return True
        except ValueError:
            end.wait()
            return False

    with ThreadPoolExecutor(num_jobs) as threads:
        got = [future.result() for future in [threads.submit(job) for _ in range(num_jobs)]]
    assert sum(got) == 1


def test_a_killed_job_does_not_block(tmp_path):
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        with only_job("--run-dir", tmp_path):
            os.write(writes, b"!")
            time.sleep(600)
    assert os.read(reads, 1) == b"!"
    with pytest.raises(ValueError, match=rf"process {child} on"), only_job("-", tmp_path):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert json.loads((tmp_path / NAME).read_text())["pid"] == child
    with only_job("--run-dir", tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


ELSEWHERE = {"pid": 7, "host": "node-3", "machine": "other", "command": "padded-dispatch train"}


def test_a_living_job_of_another_host_is_refused_where_locks_hold_on_one_host(tmp_path):
    path = tmp_path / NAME
    path.write_text(json.dumps(ELSEWHERE))
    message = (
        r"process 7 on node-3 \(padded-dispatch train\) is using it, .*; wait for its end, or "
        r"choose another folder; if it is dead, start again in \d+ s$"
    )
    with pytest.raises(ValueError, match=message), only_job("--trace", tmp_path):
        pass
    assert json.loads(path.read_text()) == ELSEWHERE
    assert [found.name for found in tmp_path.iterdir()] == [NAME]
    long_ago = time.time() - lock._FRESH_S - 5
    os.utime(path, (long_ago, long_ago))
    with only_job("--trace", tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_living_job_touches_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_TOUCH_S", 0.01)
    touched = threading.Event()
    utime = os.utime

    def touch(file) -> None:
        utime(file)
        touched.set()

    monkeypatch.setattr(os, "utime", touch)
    with only_job("--run-dir", tmp_path):
        assert touched.wait(20)


def test_a_file_system_without_locks_goes_by_the_files_age(tmp_path, monkeypatch):
    def no_locks(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with only_job("--run-dir", tmp_path):
        pass
    (tmp_path / NAME).write_text(json.dumps(ELSEWHERE))
    with pytest.raises(ValueError, match="node-3"), only_job("--run-dir", tmp_path):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"pid": 3}'])
def test_whatever_a_dead_job_left_does_not_block(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    long_ago = time.time() - lock._FRESH_S - 5
    os.utime(tmp_path / NAME, (long_ago, long_ago))
    with only_job("--run-dir", tmp_path):
        pass
