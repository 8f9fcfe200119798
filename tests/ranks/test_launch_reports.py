"""What a launch says of odd failures, and what it sends: safe, short and with the right advice."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from course_lib.launch import RankError, run
from course_lib.launch.travel import LONGEST, pack


def report(fn, *args, n: int = 1, **keywords) -> RankError:
    """The error of a run that fails."""
    with pytest.raises(RankError) as caught:
        run(fn, *args, n=n, timeout=30, **keywords)
    return caught.value


class Mute(Exception):
    """Neither str nor repr of it can be had."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


def test_an_exception_that_cannot_be_shown():
    def fail():
        raise Mute

    error = report(fail)
    assert error.kind == "raised"
    assert error.report.startswith("rank 0 raised Mute: (no message, because its __")
    assert "raised ValueError)" in error.report
    assert "raise Mute" in error.report

    def caused():
        raise RuntimeError("after") from Mute()

    assert "from Mute: (no message" in report(caused).report


def test_a_key_that_cannot_be_shown():
    error = report(lambda: {Mute(): threading.Lock()})
    assert error.kind == "result"
    assert "cannot be pickled" in error.report


def test_a_long_message_is_cut_and_that_is_said():
    def fail():
        raise ValueError("x" * 3_000_000)

    text = report(fail, n=2).report
    assert f"({3_000_000 - LONGEST:,} more characters left out)" in text
    assert len(text) < LONGEST + 1000


def test_an_exception_that_is_its_own_cause():
    def fail():
        first, second = ValueError("first"), KeyError("second")
        first.__cause__, second.__cause__ = second, first
        raise first

    text = report(fail).report
    assert text.startswith("rank 0 raised ValueError: first")
    assert text.count("from KeyError: 'second'") == 1


def test_a_recursion_is_folded():
    def again(x):
        return again(x + 1)

    lines = report(again, 1).report.splitlines()
    assert lines[0].startswith("rank 0 raised RecursionError")
    assert len(lines) == 3
    assert "return again(x + 1)" in lines[1]
    count = int(lines[2].strip().removeprefix("[the line above, ").removesuffix(" more times]"))
    assert count > 900


def test_a_recursion_of_two_functions_is_cut():
    def even(x):
        return odd(x + 1)

    def odd(x):
        return even(x + 1)

    lines = report(even, 1).report.splitlines()
    assert len(lines) < 45
    assert any("more lines ..." in line for line in lines)


def test_the_exceptions_of_a_group_are_shown():
    def fail():
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ExceptionGroup("many", [error, *map(ValueError, "abcdefg")]) from None

    lines = report(fail).report.splitlines()
    assert lines[0] == "rank 0 raised ExceptionGroup: many (8 sub-exceptions)"
    first = lines.index("  sub-exception 1: KeyError: 'inner'")
    assert lines[first + 1].endswith('raise KeyError("inner")')
    assert "  sub-exception 5: ValueError: d" in lines
    assert lines[-1] == "  ... and 3 more sub-exceptions"


@pytest.mark.parametrize(
    ("signum", "named"),
    [(signal.SIGTERM, "15 (SIGTERM)"), (40, "40 (a real-time signal)")],
)
@pytest.mark.skipif(sys.platform != "linux", reason="numbers of Linux")
def test_a_signal_that_is_no_crash(signum, named):
    text = report(lambda: os.kill(os.getpid(), signum)).report
    assert text.startswith(f"rank 0 was ended by signal {named}")
    assert "crashed" not in text.replace("no code crashed", "")
    assert "or the function itself sent this signal" in text


def test_the_advice_in_checked_mode_is_not_checked_mode():
    def unequal():
        dist.all_reduce(torch.ones(1000 * (1 + dist.get_rank())))

    said = report(unequal, n=4, checked=True)
    assert "signal 6 (SIGABRT)" in said.report
    assert "sees only calls through course_lib.comm" in said.report
    assert "run with checked=True" not in said.report


@functools.lru_cache(maxsize=7)
def fibonacci(k: int) -> int:
    return k if k < 2 else fibonacci(k - 1) + fibonacci(k - 2)


def test_cached_functions_travel_with_an_empty_cache():
    fibonacci(3)

    @functools.cache
    def local(k: int) -> int:
        return fibonacci(k) + 1

    def by_name(k: int) -> tuple[int, int]:
        return local(k), fibonacci.cache_info().maxsize

    assert run(fibonacci, 30, n=2) == [832040] * 2
    assert run(by_name, 30, n=2) == [(832041, 7)] * 2
    assert run(functools.cache(len), "abc", n=1) == [3]


def test_a_cached_function_of_a_script_travels():
    code = (
        "import functools\n"
        "from course_lib.launch import run\n"
        "@functools.lru_cache\n"
        "def double(x): return 2 * x\n"
        "print(run(double, 4, n=1), run(lambda: double(5), n=1))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "[8] [10]", out.stderr


def test_what_cannot_be_sent_is_one_error():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="variable lock") as caught:
        run(lambda: lock, n=1)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_small_view_brings_only_itself():
    def work(grad: bool):
        return torch.arange(2_000_000.0, requires_grad=grad)[5:8]

    for grad in (False, True):
        (view,) = run(work, grad, n=1)
        assert view.tolist() == [5.0, 6.0, 7.0]
        assert view.untyped_storage().nbytes() == 12
        assert view.requires_grad is grad
    rows = torch.arange(10_000.0).view(100, 100)
    assert len(pack(rows[0])) < 1000
    back = run(lambda: list(rows), n=1)[0]
    assert torch.equal(torch.stack(back), rows)
    (turned,) = run(lambda: torch.arange(6.0).view(2, 3).t(), n=1)  # all of it: as it was
    assert turned.stride() == (1, 3)
    (wide,) = run(lambda: torch.ones(1).expand(10**6), n=1)
    assert wide.untyped_storage().nbytes() == 4


def test_a_directory_that_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(RuntimeError, match="current directory has been removed.*os.chdir"):
        run(os.getpid, n=1)
