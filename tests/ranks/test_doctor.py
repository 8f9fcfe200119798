"""The doctor on this machine, with two real ranks."""

from __future__ import annotations

import json

from course_lib import cli

NAMES = {
    "python",
    "packages",
    "torch",
    "kernelspec",
    "ranks",
    "cores",
    "memory",
    "shared memory",
    "gpu",
    "loopback",
    "write access",
}


def test_this_machine_is_ready(capfd):
    assert cli.main(["doctor", "--json"]) == 0
    data = json.loads(capfd.readouterr().out)
    assert {check["name"] for check in data["checks"]} == NAMES
    assert all(check.keys() == {"name", "status", "value", "fix"} for check in data["checks"])
    assert {check["status"] for check in data["checks"]} <= {"ok", "warn"}
    assert data["ok"] is True
    assert data["take"] == "local"


def test_a_rank_that_fails_is_a_report_and_exit_1(monkeypatch, capfd):
    """A verb whose ranks fail prints the launcher's report instead of a traceback."""
    import sys
    import types

    from course_lib.launch import run

    def broken():
        raise ArithmeticError("rank says no")

    def measure(rounds, say):
        return run(broken, n=2)

    module = types.ModuleType("course_lib.bench.dp")
    module.measure = measure
    monkeypatch.setitem(sys.modules, "course_lib.bench.dp", module)
    assert cli.main(["bench", "dp"]) == 1
    printed = capfd.readouterr()
    assert "rank says no" in printed.err
    assert printed.out == ""
