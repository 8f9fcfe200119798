"""run and World from a script: results, output, conditions, arguments, and what they leave."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course_lib.launch import RankDeadline, RankError, World, api, arguments, run
from course_lib.launch.local import fork_server, warm_up
from course_lib.launch.output import KEEP, RankOutput
from course_lib.launch.rundir import PREFIX, make_run_dir, sweep
from course_lib.launch.spawned import SpawnedRanks
from course_lib.mesh import Link, Links, make_mesh


def total() -> float:
    """Sum of the ranks' numbers, by the default group."""
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_worlds_of_many_sizes(n):
    assert run(total, n=n) == [n * (n - 1) / 2] * n


def test_results_of_10_megabytes_arrive_whole():
    given = torch.arange(2_500_000, dtype=torch.float32)

    def work(x):
        return x + dist.get_rank(), {"part": x[: dist.get_rank()]}

    results = run(work, given, n=4)
    for rank, (whole, parts) in enumerate(results):
        assert torch.equal(whole, given + rank)
        assert parts["part"].shape == (rank,)


def test_a_class_defined_here_comes_back_as_itself():
    results = run(Point, 3, n=2)
    assert [type(point) for point in results] == [Point, Point]
    assert results[1].x == 3


class Point:
    """A class of the test's own module, which the ranks cannot import."""

    def __init__(self, x: int) -> None:
        self.x = x


def test_partial_functions_and_lambdas_travel():
    assert run(functools.partial(pow_of_rank, 2), n=3) == [1, 2, 4]
    assert run(lambda: pow_of_rank(3), n=2) == [1, 3]


def pow_of_rank(base: int) -> int:
    return base ** dist.get_rank()


def test_conditions_reach_the_mesh_and_ledgers_come_back():
    links = Links(Link(0.0, 1e9), Link(1e-3, 1e8), ranks_per_node=2)

    def work():
        mesh = make_mesh(dp=2)
        with mesh.compute("F"):
            pass
        return mesh.conditions.links, mesh.conditions.checked, mesh.rank

    results = run(work, n=2, pace={"F": 0.01}, links=links, checked=True)
    assert results == [(links, True, 0), (links, True, 1)]
    assert [ledger.rank for ledger in results.ledgers] == [0, 1]
    for rank, trace in enumerate(results.traces):
        assert [(span.op, span.rank) for span in trace.spans] == [("F", rank)]
        assert trace.spans[0].end - trace.spans[0].start >= 0.01


def test_output_is_shown_by_rank_and_kept(capfd):
    def work():
        print("out of", dist.get_rank())
        print("err", file=sys.stderr)
        os.system("echo from a child")

    results = run(work, n=2)
    shown = capfd.readouterr().out
    for rank in (0, 1):
        for line in (f"out of {rank}", "err", "from a child"):
            assert f"[rank {rank}] {line}" in shown.splitlines()
            assert line in results.outputs[rank].splitlines()


def test_the_end_of_a_flood_is_kept(tmp_path):
    path = tmp_path / "out"
    output = RankOutput(0, path)
    shown = []
    for block in range(6):
        with path.open("ab") as file:
            file.write(b"".join(b"%07d\n" % (block * 10**5 + line) for line in range(10**5)))
        shown += output.lines(last=block == 5)
    assert path.stat().st_size < 4 * KEEP + 10**6  # emptied on the way
    assert shown[-1] == "[rank 0] 0599999"
    assert sum("left out" in line for line in shown) == 1
    text = output.text()
    assert len(text.split("\n", 1)[1]) == KEEP
    assert text.startswith(f"... {6 * 8 * 10**5 - KEEP:,} bytes left out ...")


def test_ranks_have_one_thread_and_loopback():
    def work():
        return torch.get_num_threads(), os.environ["GLOO_SOCKET_IFNAME"]

    interface = "lo0" if sys.platform == "darwin" else "lo"
    assert run(work, n=2) == [(1, interface)] * 2


def test_without_init_only_the_variables_are_set():
    def work():
        assert not dist.is_initialized()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
        dist.init_process_group("gloo")
        return [os.environ[name] for name in names], dist.get_rank(), int(os.environ["MASTER_PORT"])

    first, second = run(work, n=2, init=False)
    assert first[:2] == (["0", "2", "0", "127.0.0.1"], 0)
    assert second[:2] == (["1", "2", "1", "127.0.0.1"], 1)
    assert first[2] == second[2] > 1024


def test_without_init_a_mesh_before_the_process_group_is_refused():
    said = "one of 2, but no process group is initialized: call torch.distributed.init_process"
    with pytest.raises(RankError, match=said):
        run(make_mesh, n=2, init=False)

    def work():
        dist.init_process_group("gloo")
        return make_mesh().sizes

    assert run(work, n=2, init=False) == [{"dp": 2}] * 2
    assert run(lambda: make_mesh().sizes, n=1, init=False) == [{}]


def test_fresh_ranks_are_fresh_and_kept_ranks_are_kept():
    def count():
        os.environ["SEEN"] = "yes"
        sys.seen = getattr(sys, "seen", 0) + 1
        return os.getpid(), sys.seen

    fresh = run(count, n=2) + run(count, n=2)
    assert len({pid for pid, _ in fresh}) == 4
    assert [seen for _, seen in fresh] == [1] * 4
    with World(2) as world:
        kept = [*world.run(count), *world.run(count)]
    assert len({pid for pid, _ in kept}) == 2
    assert [seen for _, seen in kept] == [1, 1, 2, 2]


def test_a_kept_world_releases_the_groups_of_earlier_runs():
    def files():
        make_mesh("tp-dp", tp=2)
        total()
        return len(os.listdir("/proc/self/fd"))

    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc on this system")
    with World(4) as world:
        counts = [world.run(files) for _ in range(8)]
    assert max(counts[-1]) <= max(counts[1]) + 2


def test_a_kept_world_after_a_failure_starts_again():
    def fail():
        if dist.get_rank() == 1:
            raise KeyError("gone")
        dist.barrier()

    with World(2) as world:
        with pytest.raises(RankError) as caught:
            world.run(fail)
        assert caught.value.rank == 1
        assert caught.value.kind == "raised"
        assert isinstance(caught.value.exception, KeyError)
        assert "at: barrier" in caught.value.standing[0]
        assert world.run(total) == [1.0, 1.0]
        with pytest.raises(RankDeadline):
            world.run(time.sleep, 60, timeout=0.3)
        assert world.run(total) == [1.0, 1.0]


def test_the_culprit_is_not_who_lost_a_connection():
    def work():
        if dist.get_rank() == 3:
            os.kill(os.getpid(), 9)
        dist.barrier()

    for _ in range(5):
        with pytest.raises(RankError) as caught:
            run(work)
        assert (caught.value.rank, caught.value.kind) == (3, "died")


def test_the_chain_of_causes_is_reported():
    def work():
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError("no such axis") from error

    with pytest.raises(RankError, match="no such axis") as caught:
        run(work, n=1)
    assert "from KeyError: 'missing'" in caught.value.report
    assert '{}["missing"]' in caught.value.report


def test_warm_up_waits_for_the_imports_and_may_be_called_again():
    warm_up()
    assert fork_server().ready
    warm_up()
    assert run(abs, -3, n=1) == [3]


def test_the_run_directory_holds_nothing_new_after_a_run():
    kept = set(fork_server().directory.glob("ranks-*"))  # of worlds that other tests keep
    with World(2) as world:
        world.run(total)
        assert len(set(fork_server().directory.glob("ranks-*")) - kept) == 1
    assert set(fork_server().directory.glob("ranks-*")) == kept


def test_a_stale_run_directory_is_swept_and_a_living_one_is_not():
    code = (
        "import os\nfrom course_lib.launch.rundir import make_run_dir\n"
        "print(make_run_dir(), flush=True)\nos.kill(os.getpid(), 9)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    stale, living = Path(out.stdout.strip()), make_run_dir()
    assert stale.name.startswith(PREFIX)
    assert stale.exists()
    assert stale in sweep()
    assert not stale.exists()
    assert living.exists()


def test_a_script_without_a_main_guard_runs_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "from course_lib.launch import run\n"
        "print('top')\n"
        "def rank(): return dist.get_rank()\n"
        "print(run(rank, n=3))\n"
    )
    out = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=90)
    assert out.stdout.split("\n") == ["top", "[0, 1, 2]", ""], out.stderr


def test_spawned_ranks_do_the_same(monkeypatch, tmp_path):
    def spawn(n: int) -> SpawnedRanks:
        directory = tmp_path / str(time.monotonic())
        directory.mkdir()
        return SpawnedRanks(directory, n)

    monkeypatch.setattr(api, "start_ranks", spawn)
    assert run(total, n=2) == [1.0, 1.0]
    with pytest.raises(RankError, match="rank 0 left the process with exit code 4"):
        run(lambda: os._exit(4) if dist.get_rank() == 0 else dist.barrier(), n=2)


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"n": 0}, ValueError, "n=0"),
        ({"n": 1000}, ValueError, "n=1000"),
        ({"n": "4"}, TypeError, "whole number"),
        ({"n": True}, TypeError, "whole number"),
        ({"timeout": 0}, ValueError, "timeout=0"),
        ({"timeout": float("nan")}, ValueError, "timeout=nan"),
        ({"timeout": None}, TypeError, "timeout=None"),
        ({"device": "tpu"}, ValueError, "device='tpu'"),
        ({"pace": {"F": -1.0}}, ValueError, "pace of 'F', got -1.0"),
        ({"pace": {"F": "x"}}, ValueError, "pace of 'F', got 'x'"),
        ({"pace": {"F": float("nan")}}, ValueError, "pace of 'F', got nan"),
        ({"pace": 3}, TypeError, "pace=3"),
        ({"links": 3}, TypeError, "links=3"),
        ({"checked": "yes"}, TypeError, "checked='yes'"),
        ({"init": "yes"}, TypeError, "init='yes'"),
    ],
)
def test_bad_arguments(keywords, error, words):
    with pytest.raises(error, match=words):
        run(total, **keywords)


def test_cuda_with_too_few_cards(monkeypatch):
    monkeypatch.setattr(arguments.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="needs 2 GPUs, one per rank, but this machine has 1"):
        run(total, n=2, device="cuda")
