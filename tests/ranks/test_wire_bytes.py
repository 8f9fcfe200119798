"""The ledger's formula beside the bytes that the kernel counts on a private loopback."""

from __future__ import annotations

import pytest

from course_lib.bench import wire

GLOO_OWN = "reduce_scatter, gloo's own"


@pytest.fixture(scope="module")
def measured():
    return wire.measure(rounds=5, payload=2**18)


@pytest.fixture
def private(need, measured):
    need(measured["private_namespace"], "a private network namespace (unshare -n) is not allowed")
    return {row["name"]: row for row in measured["rows"]}


def test_what_moves_is_what_the_ledger_says(private):
    for name, row in private.items():
        if name != GLOO_OWN:
            assert 1 <= row["ratio"] < 1.03, f"{name}: {row}"


def test_gloos_own_reduce_scatter_moves_twice_the_bytes_and_ours_does_not(private):
    assert 2 <= private[GLOO_OWN]["ratio"] < 2.06
    assert private["reduce_scatter, ours"]["ratio"] < 1.03


def test_text_names_every_operation_and_where_it_was_counted(measured):
    said = wire.text(measured)
    assert all(row["name"] in said for row in measured["rows"])
    assert "private network namespace" in said
    assert "machine-wide" in wire.text(measured | {"private_namespace": False})


@pytest.mark.parametrize("bad", [{"rounds": 0}, {"payload": 100}, {"payload": 0}])
def test_bad_input_is_named(bad):
    with pytest.raises(ValueError, match="multiple of 16"):
        wire.measure(**({"rounds": 1} | bad))
