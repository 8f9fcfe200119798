"""`course bench wire`: the ledger's formula beside the bytes that the kernel counted."""

from __future__ import annotations

import pytest

from course_lib.bench import wire
from course_lib.trace import SentBytes

GLOO_OWN = "reduce_scatter, gloo's own"


@pytest.fixture(scope="module")
def measured(need):
    from course_lib.trace.traffic import read_connections

    need(read_connections() is not None, "the kernel does not count what TCP sends")
    return wire.measure(rounds=5, payload=2**18)


@pytest.fixture
def rows(measured):
    return {row["name"]: row for row in measured["rows"]}


def test_what_moves_is_what_the_ledger_says(rows):
    for name, row in rows.items():
        if name != GLOO_OWN:
            assert 1 < row["ratio"] < 1.01, f"{name}: {row}"


def test_gloos_own_reduce_scatter_moves_twice_the_bytes_and_ours_does_not(rows):
    assert 2 < rows[GLOO_OWN]["ratio"] < 2.02
    assert rows["reduce_scatter, ours"]["ratio"] < 1.01


def test_text_names_every_operation_and_who_counted(measured):
    said = wire.text(measured)
    assert all(row["name"] in said for row in measured["rows"])
    assert "kernel / formula" in said


def test_without_a_count_there_is_an_error_and_no_table(monkeypatch):
    class Blind:
        def __init__(self, n):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def run(self, *_, timeout):
            return [dict.fromkeys(wire._OPERATIONS, SentBytes())] * wire.RANKS

    monkeypatch.setattr(wire, "World", Blind)
    with pytest.raises(RuntimeError, match="TCP_INFO"):
        wire.measure(rounds=1)


@pytest.mark.parametrize("bad", [{"rounds": 0}, {"payload": 100}, {"payload": 0}])
def test_bad_input_is_named(bad):
    with pytest.raises(ValueError, match="multiple of 16"):
        wire.measure(**({"rounds": 1} | bad))
