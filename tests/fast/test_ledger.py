"""The ledger and its one wire formula, without ranks."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledgers import backend_calls, unmatched_sends

from course_lib.ledger import (
    WIRE_FACTORS,
    Ledger,
    Line,
    Record,
    summarize,
    table,
    wire,
    wire_bytes_by_axis,
)


def record(op="all_reduce", payload=8, n=4, axis="dp", **more):
    return Record(axis, op, f"{op}_", payload, n, **more)


def ledger(rank, *records):
    book = Ledger(rank)
    for one in records:
        book.add(one)
    return book


@pytest.mark.parametrize(
    ("op", "sent"),
    [
        ("all_reduce", Fraction(2 * 3 * 10, 4)),
        ("reduce_scatter", Fraction(3 * 10, 4)),
        ("all_to_all", Fraction(3 * 10, 4)),
        ("all_gather", Fraction(30)),
        ("broadcast", Fraction(3 * 10, 4)),
        ("send", Fraction(10)),
        ("recv", Fraction(0)),
    ],
)
def test_wire_of_ten_bytes_on_four_ranks(op, sent):
    assert wire(op, 10, 4) == sent
    assert wire(op, 10, 1) == 0


def test_every_operation_has_its_case_above():
    assert set(WIRE_FACTORS) == {
        *("all_reduce", "reduce_scatter", "all_to_all", "all_gather", "broadcast", "send", "recv")
    }


@given(st.integers(0, 10**12), st.integers(2, 1024))
def test_laws_of_wire(payload, n):
    """All-reduce = reduce-scatter + all-gather of the shard; everything is linear in bytes."""
    shard = Fraction(payload, n)
    assert wire("all_reduce", payload, n) == wire("reduce_scatter", payload, n) + shard * (n - 1)
    for op in WIRE_FACTORS:
        assert wire(op, 3 * payload, n) == 3 * wire(op, payload, n)
        assert isinstance(wire(op, payload, n), Fraction)


@pytest.mark.parametrize(
    ("op", "payload", "n", "names"),
    [("gossip", 1, 2, "gossip"), ("send", -1, 2, "payload=-1"), ("send", 1, 0, "n=0")],
)
def test_bad_input_is_named(op, payload, n, names):
    with pytest.raises(ValueError, match=names):
        wire(op, payload, n)


def test_control_traffic_is_counted_apart():
    book = ledger(0, record(), record(), record(control=True), record("all_gather", axis="tp"))
    assert book.calls() == 3
    assert book.calls("dp") == 2
    assert book.wire_bytes("dp") == 24
    assert book.wire_bytes("dp", "all_gather") == 0
    assert len(list(book.select())) == 3
    assert sum(one.control for one in book.records) == 1
    assert wire_bytes_by_axis([book]) == {"dp": 24, "tp": 24}
    assert list(wire_bytes_by_axis([ledger(0, record(control=True))])) == []


def test_backend_calls_are_collectives_of_both_kinds():
    sent = record("send", peer=1)
    book = ledger(0, record(), record(control=True), sent)
    assert backend_calls(book) == {"all_reduce_": 2}


def test_clear_counts_from_zero():
    book = ledger(2, record())
    book.clear()
    assert (book.rank, book.calls(), book.wire_bytes()) == (2, 0, 0)


def test_summary_is_over_ranks_and_control_comes_last():
    books = [ledger(rank, record(control=True), record(payload=6, n=4)) for rank in range(4)]
    assert summarize(books) == [
        Line("dp", "all_reduce", "all_reduce_", False, 4, 24, Fraction(36)),
        Line("dp", "all_reduce", "all_reduce_", True, 4, 32, Fraction(48)),
    ]


def test_table_says_it_in_columns():
    books = [ledger(0, record(payload=10**6, n=2), record("send", 5, peer=1, control=True))]
    head, first, second = table(books).splitlines()
    assert head.split() == "axis op backend op calls payload bytes wire bytes (formula)".split()
    assert first.split() == ["dp", "all_reduce", "all_reduce_", "1", "1,000,000", "1,000,000"]
    assert second.split() == ["dp", "send", "(control)", "send_", "1", "5", "5"]
    assert len(head) == len(first) == len(second), "columns of numbers end at the same place"


def test_messages_that_nobody_received_are_found():
    sender = ledger(3, record("send", 8, peer=1), record("send", 2, peer=1))
    receiver = ledger(1, record("recv", 8, peer=3))
    assert unmatched_sends([sender, receiver]) == {(3, 1): 2}
    receiver.add(record("recv", 2, peer=3))
    assert unmatched_sends([sender, receiver]) == {}
    receiver.add(record("recv", 1, peer=0))
    assert unmatched_sends([sender, receiver]) == {(0, 1): -1}
