"""Pipeline schedules as data: what is legal, when everything happens, what is in flight."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from course_lib.schedule import (
    SCHEDULES,
    Action,
    Costs,
    Schedule,
    ScheduleError,
    Simulation,
    Span,
    bubble,
    drawing,
    from_rows,
    gpipe,
    looped,
    lower_bound,
    make,
    makespan,
    naive,
    one_f_one_b,
    predicted_bubble,
    read_csv,
    simulate,
    v_shape,
    validate,
    write_csv,
)
from course_lib.schedule.named import CHUNKS
from course_lib.schedule.validate import before, progress, settled

sizes = st.integers(1, 8)
cost = st.integers(1, 50).map(lambda tenths: tenths / 10)


def rows(text: str, name: str = "rows") -> Schedule:
    """``"0F0 0B0 / 1F0 1B0"``: ranks between slashes, cells between blanks."""
    return from_rows([row.split() for row in text.split("/")], name)


def texts(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in row] for row in schedule.rows]


# --- against what is published ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "peaks"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])], ids=["gpipe", "1f1b"]
)
def test_reference_table_of_four_ranks_and_eight_micro_batches(name, peaks):
    result = simulate(make(name, 4, 8), Costs(f=1, i=1, w=1))
    assert (result.work, result.makespan, result.span) == (24, 33, 33)
    assert result.bubble_of_total == pytest.approx(9 / 33)
    assert result.bubble_of_ideal == pytest.approx(9 / 24)
    assert result.schedule.peak_in_flight() == peaks


def test_1f1b_as_the_papers_draw_it():
    """F = B = 1: makespan 2(m+p-1), bubble (p-1)/(m+p-1), rank r keeps p-r."""
    result = simulate(make("1f1b", 4, 8), Costs.make(f=1, b=1))
    assert result.makespan == 22
    assert result.bubble_of_total == pytest.approx(3 / 11)
    assert result.schedule.peak_in_flight() == [4, 3, 2, 1]
    assert texts(result.schedule)[2][:6] == ["2F0", "2F1", "2B0", "2F2", "2B1", "2F3"]


@pytest.mark.parametrize(
    ("m", "f", "i", "w", "comm", "printed"),
    [
        (24, 18.522, 18.086, 9.337, 0.601, 0.2431),
        (32, 18.513, 18.086, 9.331, 0.626, 0.1985),
        (64, 18.546, 18.097, 9.321, 0.762, 0.1240),
    ],
)
def test_zero_bubble_tables_to_four_decimals(m, f, i, w, comm, printed):
    """Qi et al. 2023 (arXiv:2401.10241), tables 5 and 9, the 1F1B column of 1.5B, p=8."""
    result = simulate(make("1f1b", 8, m), Costs.make(f, i=i, w=w, comm=comm))
    assert round(result.bubble_of_total, 4) == printed


def torch_schedules():
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_drawn(name: str, p: int, m: int) -> list[list[str]]:
    """The order that torch prints, without its cells of communication."""
    order = getattr(torch_schedules(), name)._get_pipeline_order(
        SimpleNamespace(_num_stages=p, _n_microbatches=m)
    )
    if not isinstance(order, dict):
        pytest.skip("this torch gives no order table")
    return [[str(cell or "") for cell in order[rank]] for rank in range(p)]


def torch_run(name: str, rank: int, p: int, m: int) -> list[str]:
    """What torch's schedule does with a stage that only writes down what it is asked for."""
    done: list[str] = []

    class Stage:
        stage_index, num_stages, has_backward = rank, p, True
        is_first, is_last = rank == 0, False  # no loss is wanted

        def forward_one_chunk(self, mb, *args, **options):
            done.append(f"{rank}F{mb}")

        def backward_one_chunk(self, mb, *args, **options):
            done.append(f"{rank}B{mb}")

        def __getattr__(self, what):
            return lambda *args, **options: []

    schedule = getattr(torch_schedules(), name)(Stage(), m, loss_fn=lambda *args: None)
    schedule._initialize_stage = lambda *args: None
    schedule._step_microbatches([()] * m, [{}] * m)
    return done


def torch_interleaved(p: int, m: int, chunks: int) -> list[list[str]]:
    """The order table of torch's interleaved 1F1B, rank by rank, made without stages."""
    kind = torch_schedules().ScheduleInterleaved1F1B
    rounds = max(1, m // p)
    sizes = SimpleNamespace(
        n_local_stages=chunks, microbatches_per_round=m // rounds, pp_group_size=p,
        _n_microbatches=m,
    )  # fmt: skip
    rows = [kind._calculate_single_rank_operations(sizes, rank) for rank in range(p)]
    return [[str(cell or "") for cell in row] for row in rows]


PAIRS = [(1, 3), (2, 2), (4, 8), (5, 7), (8, 8)]


@pytest.mark.parametrize(("p", "m"), PAIRS)
def test_gpipe_is_what_torch_draws_and_runs(p, m):
    assert texts(from_rows(torch_drawn("ScheduleGPipe", p, m))) == texts(gpipe(p, m))
    for rank in range(p):
        assert torch_run("ScheduleGPipe", rank, p, m) == texts(gpipe(p, m))[rank]


@pytest.mark.parametrize(("p", "m"), PAIRS)
def test_1f1b_is_what_torch_runs(p, m):
    for rank in range(p):
        assert torch_run("Schedule1F1B", rank, p, m) == texts(one_f_one_b(p, m))[rank]


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (3, 8), (4, 8), (4, 10), (4, 3), (3, 3), (8, 16)])
def test_interleaved_is_what_torch_draws(p, m, chunks):
    """torch takes only m that its rounds divide; ours are then the same, cell for cell."""
    ours = make("interleaved", p, m, chunks)
    drawn = from_rows(torch_interleaved(p, m, chunks))
    assert (drawn.rows, drawn.placement) == (ours.rows, ours.placement)


@pytest.mark.parametrize(("p", "m", "v"), [(1, 3, 2), (2, 4, 2), (4, 8, 2), (4, 8, 3), (3, 9, 4)])
def test_interleaved_is_megatrons_where_ranks_divide_the_micro_batches(p, m, v):
    """Megatron-LM numbers the forwards of a rank k = 0..mv-1: which chunk and micro-batch is k?"""

    def cell(op: str, rank: int, k: int) -> Action:
        chunk = k % (p * v) // p
        mb = k // (p * v) * p + k % p
        return Action(op, rank + p * (chunk if op == "F" else v - 1 - chunk), mb)

    for rank, row in enumerate(make("interleaved", p, m, v).rows):
        warm_up = min(m * v, 2 * (p - rank - 1) + (v - 1) * p)
        steady = [
            cell(op, rank, k if op == "B" else warm_up + k)
            for k in range(m * v - warm_up)
            for op in "FB"
        ]
        forwards = [cell("F", rank, k) for k in range(warm_up)]
        backwards = [cell("B", rank, k) for k in range(m * v - warm_up, m * v)]
        assert list(row) == forwards + steady + backwards


def test_torch_draws_another_1f1b_than_it_runs():
    """Its table begins with F1 on the last stage; the other ranks agree. validate refuses it."""
    drawn = torch_drawn("Schedule1F1B", 4, 8)
    ours = texts(one_f_one_b(4, 8))
    assert texts(from_rows(drawn))[:3] == ours[:3]
    if texts(from_rows(drawn))[3] == ours[3]:
        pytest.skip("this torch draws it right")
    with pytest.raises(
        ScheduleError, match=r"rank 0: micro-batch 8 .* but rank 3, cell 14, has 3F8"
    ):
        validate(from_rows(drawn))


# --- closed forms -----------------------------------------------------------------------------


@given(p=sizes, m=st.integers(1, 20), f=cost, b=cost)
def test_closed_forms_of_makespan_and_bubble(p, m, f, b):
    costs = Costs.make(f, b)
    for name in ("gpipe", "1f1b"):
        result = simulate(make(name, p, m), costs)
        assert result.makespan == pytest.approx((m + p - 1) * (f + b))
        assert result.bubble_of_total == pytest.approx(predicted_bubble(name, p, m), abs=1e-9)
        assert result.bubble_of_ideal == pytest.approx((p - 1) / m, abs=1e-9)
    result = simulate(naive(p, m), costs)
    assert result.makespan == pytest.approx(m * p * (f + b))
    assert result.bubble_of_total == pytest.approx(predicted_bubble("naive", p, m), abs=1e-9)


@given(p=sizes, m=sizes, chunks=st.integers(1, 3))
def test_peaks_in_flight(p, m, chunks):
    assert naive(p, m, chunks).peak_in_flight() == [chunks] * p
    assert gpipe(p, m, chunks).peak_in_flight() == [m * chunks] * p
    assert one_f_one_b(p, m).peak_in_flight() == [min(p - rank, m) for rank in range(p)]


@given(p=sizes, m=sizes, comm=cost)
def test_a_hop_delays_and_blocks_nobody(p, m, comm):
    """naive: every micro-batch crosses p-1 boundaries twice. GPipe: the first and the last one."""
    costs = Costs.make(1, 2, comm=comm)
    hops = 2 * (p - 1) * comm
    assert simulate(naive(p, m), costs).makespan == pytest.approx(m * (p * 3 + hops))
    assert simulate(gpipe(p, m), costs).makespan == pytest.approx((m + p - 1) * 3 + hops)


def test_no_hop_within_a_rank():
    one = simulate(gpipe(1, 3, chunks=4), Costs.make(1, 2, comm=100))
    assert one.makespan == 3 * 4 * 3
    turn = rows("0F0 3F0 3B0 0B0 / 1F0 2F0 2B0 1B0")  # a V: stages 1 and 2 share a rank
    assert turn.placement == v_shape(2)
    assert simulate(turn, Costs.make(1, 2, comm=10)).makespan == 4 * 3 + 4 * 10


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (4, 1), (8, 3), (3, 2)])
def test_few_ranks_and_few_micro_batches(name, p, m):
    schedule = make(name, p, m)
    validate(schedule)
    chunks = CHUNKS.get(name, 1)
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == (p, p * chunks, m)
    assert simulate(schedule, Costs.make(1, 2)).work == 3 * m * chunks
    if p == 1:
        assert simulate(schedule, Costs.make(0.1, 0.2)).bubble_of_total == 0


@pytest.mark.parametrize("chunks", [2, 3])
def test_chunks_go_round(chunks):
    for name in ("naive", "gpipe"):
        schedule = make(name, 4, 5, chunks)
        validate(schedule)
        assert schedule.placement == looped(4, chunks)
        assert schedule.stages_of(1) == list(range(1, 4 * chunks, 4))
        assert simulate(schedule, Costs()).work == 5 * 3 * chunks
    assert simulate(gpipe(4, 8, chunks), Costs()).makespan == (8 * chunks + 3) * 3


@given(p=sizes, m=st.integers(1, 24), chunks=st.integers(1, 4))
def test_interleaved_of_any_size(p, m, chunks):
    """Legal for any m; where m is a multiple of p the textbook's bubble and memory."""
    schedule = make("interleaved", p, m, chunks)
    validate(schedule)
    result = simulate(schedule, Costs())
    full = simulate(one_f_one_b(p, m), Costs()).makespan * chunks
    assert result.makespan <= full
    if chunks == 1:
        assert schedule.rows == one_f_one_b(p, m).rows
    elif m % p == 0 and m > p:
        assert result.makespan == 3 * (m * chunks + p - 1)
        assert schedule.peak_in_flight()[0] == p * chunks + p - 1
    elif m >= p:
        assert result.makespan == 3 * (m * chunks + p - 1)


def test_unequal_stages():
    costs = Costs(f=1, i=1, w=1, per_stage=(1, 3))
    result = simulate(gpipe(2, 4), costs)
    assert result.work == 4 * 9
    assert result.makespan == 1 + 4 * 9 + 2  # the slow stage never waits once it has begun
    with pytest.raises(
        ValueError,
        match="expected one factor for each of the schedule's 3 stages, got per_stage with 2",
    ):
        simulate(gpipe(3, 4), costs)


def test_big_schedules_take_linear_work():
    """p=64, m=512: each action is yielded once, and ranks are taken up again at most once each."""
    schedule = one_f_one_b(64, 512)
    actions = 64 * 512 * 2
    assert sum(1 for _ in progress(schedule)) == actions
    result = simulate(schedule, Costs.make(1, 2))
    assert result.makespan == (512 + 63) * 3
    looked = Counter()

    class Counted(tuple):
        __slots__ = ()

        def __getitem__(self, place):
            looked["rows"] += 1
            return super().__getitem__(place)

    counted = Schedule("x", tuple(Counted(row) for row in schedule.rows), schedule.placement)
    assert sum(1 for _ in progress(counted)) == actions
    assert looked["rows"] <= 2 * actions


# --- simulation of anything -------------------------------------------------------------------


def draw_legal(seed: int, p: int, m: int, chunks: int, split: float) -> Schedule:
    """Rows made by playing: a random rank does a random thing that it can do, until all is done."""
    dice = random.Random(seed)
    stages = p * chunks
    placement = [rank for rank in range(p) for _ in range(chunks)]
    dice.shuffle(placement)
    todo = set()
    for stage, mb in itertools.product(range(stages), range(m)):
        halves = "IW" if dice.random() < split else "B"
        todo |= {Action(op, stage, mb) for op in "F" + halves}
    done: set[Action] = set()
    made: list[list[Action]] = [[] for _ in range(p)]
    while todo:
        able = [a for a in sorted(todo) if all(need in done for need in before(a, stages))]
        action = dice.choice(able)
        todo.remove(action)
        done.update(settled(action))
        made[placement[action.stage]].append(action)
    return Schedule("random", tuple(map(tuple, made)), tuple(placement))


legal = st.builds(
    draw_legal,
    seed=st.integers(0, 10**6),
    p=st.integers(1, 4),
    m=st.integers(1, 4),
    chunks=st.integers(1, 3),
    split=st.sampled_from([0.0, 0.5, 1.0]),
)


def ends_of(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """When each action ends, by its definition: recursion instead of a simulation."""
    known: dict[Action, float] = {}
    place = {a: (rank, at) for rank, row in enumerate(schedule.rows) for at, a in enumerate(row)}

    def actual(need: Action) -> Action:
        return need if need in place else Action("I", need.stage, need.mb)

    def end(action: Action) -> float:
        if action not in known:
            rank, at = place[action]
            ready = [end(schedule.rows[rank][at - 1])] if at else [0.0]
            for need in map(actual, before(action, schedule.stages)):
                ready.append(end(need) + costs.comm * (place[need][0] != rank))
            known[action] = max(ready) + costs.of(action)
        return known[action]

    return {action: end(action) for action in place}


@settings(max_examples=100)
@given(schedule=legal, f=cost, i=cost, w=cost, comm=cost)
def test_any_legal_schedule_is_played_as_defined(schedule, f, i, w, comm):
    validate(schedule)
    costs = Costs(f, i, w, comm)
    result = simulate(schedule, costs)
    ends = ends_of(schedule, costs)
    assert len(result.spans) == len(ends)
    for rank, row in enumerate(result.rows):
        assert [Action(s.op, s.stage, s.mb) for s in row] == list(schedule.rows[rank])
        assert all(span.rank == rank for span in row)
        for span in row:
            assert span.end == pytest.approx(ends[Action(span.op, span.stage, span.mb)])
        for one, following in itertools.pairwise(row):
            assert following.start >= one.end
    assert result.makespan == pytest.approx(max(ends.values()))


@settings(max_examples=100)
@given(schedule=legal, f=cost, b=cost)
def test_peak_in_flight_counts_half_open_intervals(schedule, f, b):
    result = simulate(schedule, Costs.make(f, b))
    for row, peak in zip(result.rows, schedule.peak_in_flight(), strict=True):
        began = {(s.stage, s.mb): s.start for s in row if s.op == "F"}
        over = {(s.stage, s.mb): s.end for s in row if s.op in ("B", "W")}
        moments = [s.start for s in row]
        seen = max(sum(began[key] <= at < over[key] for key in began) for at in moments)
        assert seen == peak


@settings(max_examples=100)
@given(schedule=legal, f=cost, i=cost, w=cost, comm=cost, slow=cost)
def test_no_legal_schedule_beats_the_bound(schedule, f, i, w, comm, slow):
    factors = (slow, *[1.0] * (schedule.stages - 1))
    costs = Costs(f, i, w, comm, factors)
    bound = lower_bound(schedule.placement, schedule.microbatches, costs)
    assert simulate(schedule, costs).makespan >= bound * (1 - 1e-9)


def test_end_and_start_at_one_instant_do_not_overlap():
    assert rows("0F0 0B0 0F1 0B1").peak_in_flight() == [1]
    assert rows("0F0 0I0 0F1 0W0 0I1 0W1").peak_in_flight() == [2]


@given(schedule=legal)
def test_text_brings_a_schedule_back(schedule):
    back = read_csv(write_csv(schedule), schedule.name)
    assert (back.rows, back.placement) == (schedule.rows, schedule.placement)


@given(schedule=legal)
def test_every_schedule_can_be_drawn(schedule):
    drawn = drawing(simulate(schedule, Costs(0.3, 0.5, 0.7, 0.2)), 60)
    assert max(map(len, drawn.splitlines())) <= 60
    assert drawn.isascii()


# --- what is illegal, and why -----------------------------------------------------------------


@settings(max_examples=100)
@given(schedule=legal, seed=st.integers(0, 10**6))
def test_random_swaps_stay_legal_or_are_refused(schedule, seed):
    """Whatever validate lets pass can be played; whatever it refuses truly cannot."""
    dice = random.Random(seed)
    made = [list(row) for row in schedule.rows]
    row = dice.choice([row for row in made if len(row) > 1])
    one, other = dice.sample(range(len(row)), 2)
    row[one], row[other] = row[other], row[one]
    mutant = Schedule("mutant", tuple(map(tuple, made)), schedule.placement)
    try:
        validate(mutant)
    except ScheduleError:
        with pytest.raises(RecursionError):
            ends_of(mutant, Costs())
    else:
        simulate(mutant, Costs())
        ends_of(mutant, Costs())


@settings(max_examples=100)
@given(schedule=legal, seed=st.integers(0, 10**6), how=st.sampled_from(["drop", "double", "move"]))
def test_lost_doubled_and_misplaced_actions_are_refused(schedule, seed, how):
    dice = random.Random(seed)
    made = [list(row) for row in schedule.rows]
    rank = dice.randrange(len(made))
    action = dice.choice(made[rank])
    if how == "drop":
        made[rank].remove(action)
    elif how == "double":
        made[rank].insert(dice.randrange(len(made[rank]) + 1), action)
    else:
        assume(len(made) > 1)
        made[rank].remove(action)
        made[rank - 1].append(action)
    mutant = Schedule("mutant", tuple(map(tuple, made)), schedule.placement)
    with pytest.raises(ScheduleError, match="rank"):
        validate(mutant)


ILLEGAL = {
    "no backward": ("0F0 0F1 0B0 0B1 / 1F0 1B0 1F1", r"rank 1: micro-batch 1 on stage 1 has no "
        r"backward \(1B1 is missing\)"),
    "no forward": ("0F0 0B0 / 1B0", r"rank 1: micro-batch 0 on stage 1 has no forward"),
    "half a backward": ("0F0 0I0", r"rank 0: micro-batch 0 on stage 0 has half a backward "
        r"\(0W0 is missing\)"),
    "other half": ("0F0 0W0", r"has half a backward \(0I0 is missing\)"),
    "backward and its half": ("0F0 0B0 0W0", r"a whole backward \(0B0\) and also 0W0"),
    "twice": ("0F0 0B0 0B0", r"rank 0, cell 2: 0B0 is done a second time \(first in cell 1\)"),
    "a stage lacks a micro-batch": ("0F0 0B0 / 1F0 1B0 1F1 1B1", r"rank 0: micro-batch 1 on stage "
        r"0 has neither forward nor backward, but rank 1, cell 2, has 1F1"),
    "a micro-batch left out": ("0F0 0F2 0B0 0B2", r"micro-batch 1 on stage 0 has no forward"),
    "backward first": ("0F0 0B0 / 1B0 1F0", r"rank 1, cell 0: 1B0 comes before 1F0 \(cell 1\)"),
    "weights before input": ("0F0 0W0 0I0", r"rank 0, cell 1: 0W0 comes before 0I0 \(cell 2\)"),
    "stages of one rank in wrong order": ("1F0 0F0 1B0 0B0", r"rank 0, cell 0: 1F0 comes before "
        r"0F0 \(cell 1\)"),
    "halves of one rank in wrong order": ("0F0 1F0 0B0 1I0 1W0", r"rank 0, cell 2: 0B0 comes "
        r"before 1I0 \(cell 3\)"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "reason"), ILLEGAL.values(), ids=ILLEGAL)
def test_illegal_rows_are_refused_with_reason_and_place(text, reason):
    with pytest.raises(ScheduleError, match=reason):
        validate(rows(text))


def test_a_deadlock_says_who_waits_for_whom():
    stuck = rows("0F0 0B0 0F1 0B1 / 1F0 1F1 1B0 1B1")
    with pytest.raises(ScheduleError) as error:
        validate(stuck)
    assert str(error.value) == (
        "deadlock: no rank can continue; "
        "rank 0 is at cell 1, 0B0, and waits for 1B0 of rank 1, which has it in cell 2; "
        "rank 1 is at cell 1, 1F1, and waits for 0F1 of rank 0, which has it in cell 2"
    )
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(stuck, Costs())


def test_a_deadlock_names_the_circle_and_not_the_whole_pipeline():
    made = [list(row) for row in one_f_one_b(16, 16).rows]
    made[3] = [a for a in made[3] if a.op == "B"] + [a for a in made[3] if a.op == "F"]
    with pytest.raises(ScheduleError, match=r"rank 3, cell 0: 3B0 comes before 3F0"):
        validate(Schedule("x", tuple(map(tuple, made)), looped(16)))
    made[3] = [Action(a.op, 3, a.mb) for a in naive(16, 16).rows[3]]
    with pytest.raises(ScheduleError) as error:
        validate(Schedule("x", tuple(map(tuple, made)), looped(16)))
    assert str(error.value).count("waits for") < 16
    assert "rank 3 is at cell 1, 3B0" in str(error.value)


def test_a_deadlock_on_half_a_backward_names_the_half():
    with pytest.raises(ScheduleError, match="0B0, and waits for 1I0 of rank 1, which has it in"):
        validate(rows("0F0 0B0 0F1 0B1 / 1F0 1F1 1I0 1W0 1B1"))


def test_simulating_a_row_that_lacks_something():
    lacking = Schedule("x", (*rows("0F0 0B0 / 1F0 1B0").rows[:1], ()), (0, 1))
    with pytest.raises(ScheduleError, match="waits for 1B0, which rank 1 does not have in its row"):
        simulate(lacking, Costs())


def test_more_in_flight_than_allowed():
    validate(one_f_one_b(4, 8), peak=[4, 3, 2, 1])
    with pytest.raises(ScheduleError, match=r"rank 1, cell 3: 1F3 makes 4 in flight, 3 are allowed "
                       r"\(the row's peak is 8\)"):  # fmt: skip
        validate(gpipe(4, 8), peak=[8, 3, 8, 8])
    with pytest.raises(ValueError, match="expected one peak for each of 4 ranks, got 3"):
        validate(gpipe(4, 8), peak=[8, 8, 8])


def test_rows_made_by_hand_in_python():
    F0, B0 = Action("F", 0, 0), Action("B", 0, 0)
    for made, placement, reason in [
        (((F0, B0), ()), (0, 0), "rank 1 has nothing to do"),
        (((),), (0,), "rank 0 has nothing to do"),
        (((F0, B0), (Action("F", 0, 1),)), (0,), "0F1 is on stage 0, which is on rank 0"),
        (((F0, B0, Action("F", 5, 0)),), (0,), r"5F0 is on stage 5, but the stages are 0..0"),
        (((Action("X", 0, 0),),), (0,), "the operation is one of F, B, I, W"),
        (((F0, B0, Action("F", 0, -1)),), (0,), "micro-batches are numbered from 0"),
        (((F0, B0),), (0, 1), "rank 1: micro-batch 0 on stage 1 has neither"),
    ]:
        with pytest.raises(ScheduleError, match=reason):
            validate(Schedule("x", made, placement))


def test_a_drawing_that_many_notes_show_is_no_schedule():
    """GPipe drawn with backwards on two ranks only: the others never learn."""
    drawn = """0F0,0F1,0F2,0F3,,,,0B3,0B2,0B1,0B0
,1F0,1F1,1F2,1F3,,,
,,2F0,2F1,2F2,2F3,,
,,,3F0,3F1,3F2,3F3,3B3"""
    with pytest.raises(ScheduleError, match=r"rank 1: micro-batch 0 on stage 1 has no backward"):
        validate(read_csv(drawn))
    # Completed it is legal, and takes longer than drawn: 14 columns, not 11.
    complete = from_rows(
        [[f"{r}F{mb}" for mb in range(4)] + [f"{r}B{mb}" for mb in (3, 2, 1, 0)] for r in range(4)]
    )
    validate(complete)
    assert simulate(complete, Costs.make(1, 1)).makespan == 14


# --- text -------------------------------------------------------------------------------------


def test_cells_as_torch_prints_them():
    text = "\ufeff0F0, 0F1 ,,0B0,0REDUCE_GRAD\n\n0SEND_F0,,1F0,1I0,1F1,,1W0,1B1,1UNSHARD\n,,\n"
    schedule = read_csv(text.lstrip("\ufeff"), "mine")
    assert texts(schedule) == [["0F0", "0F1", "0B0"], ["1F0", "1I0", "1F1", "1W0", "1B1"]]
    assert (schedule.name, schedule.placement) == ("mine", (0, 1))
    paired = read_csv("0F0,0F1,(1F0;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1")
    assert texts(paired) == [["0F0", "0F1", "1F0", "1B0", "0B0", "1F1", "1B1", "0B1"]]
    assert write_csv(gpipe(2, 1)) == "0F0,0B0\n1F0,1B0\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "there is no action in any row"),
        (",,\n,,", "there is no action in any row"),
        ("0F0,0X0", r"rank 0, cell 1: '0X0' is no action: write stage, one of F, B, I, W, and"),
        ("0F0,F1", r"rank 0, cell 1: 'F1' is no action"),
        ("0f0", "'0f0' is no action"),
        ("0F-1", "'0F-1' is no action"),
        ("0F0;0B0", "'0F0;0B0' is no action"),
        ("0F9999999999", "is no action"),
        ("0F0,0B0\n0F1,0B1", r"rank 1, cell 0: 0F1 is on stage 0, which rank 0 holds"),
        ("0F0,0B0\n2F0,2B0", "stage 1 appears in no row, but stage 2 does"),
        ("999999999F0", "stage 0 appears in no row, but stage 999999999 does"),
        ("0F0,0F999999999", None),
        ("0F0,0B0\n,,\n1F0,1B0", "rank 1 has nothing to do"),
    ],
)
def test_text_that_is_no_schedule(text, reason):
    with pytest.raises(ScheduleError, match=reason or "micro-batch 0 on stage 0 has no backward"):
        validate(read_csv(text))


# --- costs and shares -------------------------------------------------------------------------


def test_b_is_i_plus_w():
    assert Costs.make() == Costs(1, 1, 1, 0)
    assert Costs.make(f=3) == Costs(3, 3, 3)
    assert Costs.make(1, b=3) == Costs(1, 1.5, 1.5)
    assert Costs.make(1, i=2, w=0) == Costs(1, 2, 0)
    assert Costs.make(1, b=3, i=2) == Costs(1, 2, 1) == Costs.make(1, b=3, w=1)
    assert Costs.make(1, b=0.3, i=0.1, w=0.2, comm=4) == Costs(1, 0.1, 0.2, 4)
    costs = Costs(1, 2, 3)
    assert [costs.of(Action(op, 0, 0)) for op in "FBIW"] == [1, 5, 2, 3]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"f": -1}, r"f=-1: a cost is a number from 0"),
        ({"b": -2}, "b=-2"),
        ({"i": 1, "w": -1}, "w=-1"),
        ({"comm": float("nan")}, "comm=nan"),
        ({"f": float("inf")}, "f=inf"),
        ({"i": 1}, "both of its halves i and w"),
        ({"w": 1}, "both of its halves i and w"),
        ({"b": 3, "i": 1, "w": 1}, r"b=3 is not i \+ w = 2"),
        ({"b": 3e-12, "i": 1e-12, "w": 1e-12}, "is not i"),
        ({"b": 1, "i": 2}, "half of the backward cannot cost more than b=1"),
        ({"f": 0, "b": 0}, "there is no work to schedule"),
    ],
)
def test_costs_that_cannot_be(wrong, reason):
    with pytest.raises(ValueError, match=reason):
        Costs.make(**wrong)


def test_costs_are_checked_however_they_are_made():
    with pytest.raises(ValueError, match="i=-1"):
        Costs(i=-1)
    with pytest.raises(ValueError, match=r"per_stage\[1\]=-2"):
        Costs(per_stage=(1, -2))


def test_actions_that_cost_nothing():
    assert simulate(gpipe(2, 2), Costs.make(f=0, b=1)).makespan == 3
    assert simulate(gpipe(2, 2), Costs.make(f=1, b=0)).bubble_of_ideal == pytest.approx(1 / 2)


def test_shares_are_of_the_busiest_rank():
    """Rank 1 works 5 of 8; the rows may start anywhere on their clock, as measured ones do."""
    measured = [[Span(0, "F", 10, 12), Span(0, "B", 15, 18)], [Span(1, "F", 12, 15)]]
    assert makespan(measured) == 8
    assert bubble(measured) == (pytest.approx(3 / 8), pytest.approx(3 / 5))
    result = Simulation(gpipe(2, 1), tuple(map(tuple, measured)), Costs())
    assert result.span == 8
    assert bubble([[Span(0, "F", 1, 1)]]) == (0, 0)


def test_span_is_the_longest_of_one_rank():
    """The last rank starts late and ends last: no rank is there all the time."""
    costs = Costs(f=1, i=1, w=1, per_stage=(1, 3))
    result = simulate(rows("0F0 0I0 0W0 / 1F0 1I0 1W0"), costs)
    assert [(row[0].start, row[-1].end) for row in result.rows] == [(0, 9), (1, 10)]
    assert (result.makespan, result.span) == (10, 9)


# --- names and sizes --------------------------------------------------------------------------


def test_names():
    assert list(SCHEDULES) == [
        "naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no schedule is called 'zb'; choose from naive"):
        make("zb", 4, 8)
    with pytest.raises(ValueError, match="no schedule is called 'zb'"):
        predicted_bubble("zb", 4, 8)
    with pytest.raises(ValueError, match="1f1b has one chunk per rank, got chunks=2"):
        make("1f1b", 4, 8, chunks=2)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "4"])
def test_sizes_are_whole_numbers_from_one(name, wrong):
    with pytest.raises(ValueError, match=r"expected a whole number, 1 or more, got ranks="):
        make(name, wrong, 8)
    with pytest.raises(ValueError, match=r"expected a whole number, 1 or more, got microbatches="):
        make(name, 4, wrong)
    with pytest.raises(ValueError, match=r"expected a whole number, 1 or more, got chunks="):
        make(name, 4, 8, wrong)


# --- as text ----------------------------------------------------------------------------------


def test_drawing_is_to_scale_and_shows_the_bubble():
    drawn = drawing(simulate(one_f_one_b(2, 2), Costs.make(1, 2)), 60).splitlines()
    assert drawn[:4] == [
        "1f1b, 2 ranks, 2 micro-batches; F 1, B 2, transfer 0",
        "rank 0 F0---F1---..........B0========.....B1======== peak 2",
        "rank 1 .....F0---B0========F1---B1========.......... peak 1",
        "       0                                           9",
    ]
    assert " ".join(drawn[4:]) == (
        "F forward, B backward, . idle; peak: most (stage, micro-batch) pairs in flight. "
        "Makespan 9, of which the busiest rank works 6: the bubble is 33.3% of total time, 50.0% "
        "of ideal time; at most 2 in flight, on rank 0."
    )


def test_drawing_tells_halves_and_second_stages_apart():
    split = simulate(rows("0F0 3F0 3I0 0I0 3W0 0W0 / 1F0 2F0 2B0 1B0"), Costs(1, 1, 1))
    drawn = drawing(split)
    assert "F 1, B 2 (I 1 + W 1)" in drawn
    assert "rank 0 F0---..........F0'--I0'++" in drawn
    assert "I input gradient, W weight gradient" in " ".join(drawn.split())
    assert "' marks a rank's second stage." in " ".join(drawn.split())


def test_drawing_of_actions_too_short_for_their_clock():
    """Beside a hop of 3 a float has no room for 1e-30: no span has a length."""
    drawn = drawing(simulate(make("1f1b", 4, 2), Costs(0, 1e-30, 0, 3, per_stage=(0, 0, 0, 1))), 60)
    assert "Makespan 18" in drawn


def test_drawing_does_not_depend_on_the_unit_of_time():
    def drawn(unit):
        return drawing(simulate(one_f_one_b(2, 2), Costs.make(unit, 2 * unit)), 60).splitlines()

    def actions(lines):
        return [line for line in lines if line.startswith("rank")]

    assert len(actions(drawn(1))) == 2
    assert actions(drawn(1 / 8)) == actions(drawn(1)) == actions(drawn(2000))
    assert "Makespan 18,000, of which" in " ".join(drawn(2000))
    assert "Makespan 1.125, of which" in " ".join(drawn(1 / 8))


def test_drawing_says_what_it_leaves_out():
    small = drawing(simulate(gpipe(4, 8), Costs.make(1, 2)))
    assert "left out" not in small
    assert "Scaled down" not in small
    assert "F7" in small
    assert "B7==" in small
    assert "number of its micro-batch is left out" in " ".join(
        drawing(simulate(gpipe(4, 8, 2), Costs.make(1, 2))).split()
    )
    big = drawing(simulate(one_f_one_b(64, 128), Costs.make(1, 2)))
    assert "Scaled down: a column is" in big
    assert "... 32 ranks between them are not drawn" in big
    assert max(map(len, big.splitlines())) <= 80
    assert len(big.splitlines()) < 42
    with pytest.raises(ValueError, match="width=5"):
        drawing(simulate(gpipe(2, 2), Costs()), 5)
