"""`course bench pp`: compare our schedules with torch's, and padded steps with simulated ones.

All contestants run in the same four processes. Each trains its own copy of a model with 5.0 M
parameters on the same batches; the vocabulary is 4 times the hidden size (8 times in large
models). ``torch 1f1b again`` is a second one: its ratio to the first is the noise. By default,
torch's last stage stores the logits of all micro-batches to return them; ``torch 1f1b, lean`` does
not. Torch's ZB-H1 is its interleaved zero bubble with one stage per rank.

The real arithmetic of four ranks on two cores hides bubbles. In the padded steps, ranks sleep
instead of competing for cores, so that the bubbles are visible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from course_lib import comm, pp
from course_lib.bench.rounds import Say, interleave, quiet, ratios, slowest_rank, timed
from course_lib.data import batch
from course_lib.launch import World
from course_lib.mesh import Mesh, make_mesh
from course_lib.model import ModelConfig, build_model
from course_lib.schedule import Costs, Schedule, bubble, make, makespan, simulate
from course_lib.schedule.text import spoken
from course_lib.trace import TOO_BUSY, PeakLiveBytes, overshoot

CONFIG = ModelConfig(layers=8, hidden=192, heads=8, kv_heads=8, ffn=768, vocab=768, max_seq_len=64)
PACED_CONFIG = ModelConfig(layers=8)  # small: its arithmetic must take less time than the pace
RANKS, MICRO_BATCHES, PACED_MICRO_BATCHES = 4, 16, 8
COSTS = Costs.make(f=0.02, i=0.02, w=0.02)  # seconds per action on one stage
SLOW = replace(COSTS, per_stage=(1.0, 2.0, 1.0, 1.0))  # an older GPU for the second stage
PACED = {
    name: (name, COSTS)
    for name in ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
}
PACED |= {f"{name}, one slow": (name, SLOW) for name in ("1f1b", "zb-h1")}
PACED_STEPS = 3
ALARM = 1.25
TORCH = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zb-h1": schedules.ScheduleInterleavedZeroBubble,
    "zb-v": schedules.ScheduleZBVZeroBubble,
    "dualpipe-v": schedules.ScheduleDualPipeV,
}
Step = Callable[[int], None]


def measure(rounds: int = 20, say: Say = quiet) -> dict:
    """Return medians of ms per step, ratios to torch, last-stage peaks, and padded steps."""
    with World(RANKS) as world:
        by_rank = world.run(_time_ranks, rounds, say, timeout=300 + 60 * rounds)
        paced = [_paced(world, name, say) for name in PACED]
    times = slowest_rank([seconds for seconds, _ in by_rank])
    peaks = {name: by_rank[_schedule(name).placement[-1]][1][name] for name in times}
    return {
        "ranks": RANKS,
        "micro_batches": MICRO_BATCHES,
        "rounds": rounds,
        "parameters": sum(p.numel() for p in build_model(CONFIG).parameters()),
        "milliseconds": {name: 1e3 * median(seconds) for name, seconds in times.items()},
        "ratio_to_torch": {
            name: ratios(times, _peer(name))[name] for name in times if name != _peer(name)
        },
        "last_stage_peak_bytes": peaks,
        "peak_ratio_to_torch": {
            name: peaks[name] / peaks[_peer(name)] for name in times if name != _peer(name)
        },
        "paced": paced,
    }


def _peer(name: str) -> str:
    """Return the name of torch's contestant for the same schedule."""
    return f"torch {_schedule(name).name}"


def _schedule(contestant: str) -> Schedule:
    """Return the schedule whose name is a word of the contestant's name."""
    found = next(name for name in TORCH if name in contestant.replace(",", "").split())
    return make(found, RANKS, MICRO_BATCHES)


def text(result: dict) -> str:
    """Return the result as two tables."""
    return "\n".join([*_beside_torch(result), "", *_beside_simulation(result["paced"])])


def _beside_torch(result: dict) -> list[str]:
    lines = [
        f"Pipelines and torch's: {result['ranks']} ranks, {result['micro_batches']} "
        f"micro-batches, {result['parameters'] / 1e6:.1f} M parameters, {result['rounds']} rounds",
        f"{'':<18}{'ms/step':>10}{'to torch':>10}{'last-stage peak MB':>20}{'to torch':>10}",
    ]
    for name, milliseconds in result["milliseconds"].items():
        slower, more = (result[key].get(name) for key in ("ratio_to_torch", "peak_ratio_to_torch"))
        shown = "1" if slower is None else f"{slower:.2f}"
        peak = result["last_stage_peak_bytes"][name] / 1e6
        memory = "1" if more is None else f"{more:.2f}"
        lines.append(f"{name:<18}{milliseconds:>10.1f}{shown:>10}{peak:>20.2f}{memory:>10}")
    if result["ratio_to_torch"]["1f1b"] > ALARM:
        lines.append(f"1f1b takes more than {ALARM} times as long as torch's: check it")
    return [
        *lines,
        "Peak: live bytes allocated during a step, without parameters and gradients, which are "
        "allocated before it.",
        "The ratio of 'torch 1f1b again' to 'torch 1f1b' is the noise of this measurement.",
    ]


def _beside_simulation(paced: list[dict]) -> list[str]:
    lines = [
        f"Compute padded by sleep, {PACED_MICRO_BATCHES} micro-batches, on each stage "
        f"{spoken(COSTS, 'FBIW')}, twice as long on a slow stage; median of {PACED_STEPS} steps",
        f"{'':<18}{'ms simulated':>14}{'ms measured':>13}{'ratio':>8}{'bubble simulated':>18}"
        f"{'measured':>10}{'overshoot':>11}",
    ]
    for row in paced:
        lines.append(
            f"{row['name']:<18}{row['simulated_ms']:>14.0f}{row['measured_ms']:>13.0f}"
            f"{row['ratio']:>8.3f}{row['bubble_simulated']:>18.3f}{row['bubble_measured']:>10.3f}"
            f"{row['overshoot']:>11.3f}"
        )
    if any(row["overshoot"] > TOO_BUSY for row in paced):
        lines.append(
            "The machine was too busy: sleeps took more than 10 % too long. Compare the order, not "
            "the times."
        )
    return lines


# --- real arithmetic ------------------------------------------------------------------------


def _time_ranks(rounds: int, say: Say) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the seconds of every contestant, and its peak of live bytes on this rank."""
    mesh = make_mesh(pp=RANKS)
    steps = {name: contestant(mesh) for name, contestant in _CONTESTANTS.items()}
    times = interleave({name: timed(step, mesh) for name, step in steps.items()}, rounds, say=say)
    peaks = {}
    say("peak memory")
    for name, step in steps.items():
        with PeakLiveBytes() as live:
            step(0)
        peaks[name] = live.peak
    return times, peaks


def _inputs(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(step % 4, seed=0, batch_size=MICRO_BATCHES, seq_len=CONFIG.max_seq_len)


def _ours(name: str, mesh: Mesh) -> Step:
    schedule = make(name, RANKS, MICRO_BATCHES)
    stages = pp.make_stages(build_model(CONFIG), schedule, mesh.pp.rank)
    optimizer = torch.optim.SGD(pp.parameters(stages), lr=1e-3)

    def step(number: int) -> None:
        whole = _inputs(number)
        cut = list(zip(*(part.chunk(MICRO_BATCHES) for part in whole), strict=True))
        optimizer.zero_grad(set_to_none=False)
        pp.run(schedule, stages, mesh, cut, lambda y, t: _mean_loss(y, t) / MICRO_BATCHES)
        optimizer.step()

    return step


def torchs_schedule(
    name: str, stages: Mapping[int, nn.Module], microbatches: int, **options: Any
) -> Any:
    """Torch's schedule of this name over ``stages``, which :func:`pp.make_stages` made for ours."""
    last = make(name, RANKS, microbatches).stages
    parts = [PipelineStage(stages[at], at, last, torch.device("cpu")) for at in stages]
    kind: Any = TORCH[name]
    one_stage = issubclass(kind, schedules.PipelineScheduleSingle)
    return kind(parts[0] if one_stage else parts, microbatches, **options)


def _torchs(name: str, mesh: Mesh, return_outputs: bool = True) -> Step:
    ours = make(name, RANKS, MICRO_BATCHES)
    stages = pp.make_stages(build_model(CONFIG), ours, mesh.pp.rank)
    schedule = torchs_schedule(name, stages, MICRO_BATCHES, loss_fn=_mean_loss)
    optimizer = torch.optim.SGD(pp.parameters(stages), lr=1e-3)

    def step(number: int) -> None:
        tokens, targets = _inputs(number)
        optimizer.zero_grad(set_to_none=False)
        given = [tokens] if 0 in stages else []
        target = targets if ours.stages - 1 in stages else None
        schedule.step(*given, target=target, return_outputs=return_outputs)
        optimizer.step()

    return step


def _mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


_CONTESTANTS: dict[str, Callable[[Mesh], Step]] = {
    **{
        f"{whose}{name}": partial(train, name)
        for name in TORCH
        for whose, train in (("torch ", _torchs), ("", _ours))
    },
    "torch 1f1b again": partial(_torchs, "1f1b"),
    "torch 1f1b, lean": partial(_torchs, "1f1b", return_outputs=False),
}


# --- compute padded by sleep ----------------------------------------------------------------


def _paced(world: World, name: str, say: Say) -> dict:
    """Return medians of padded steps of one schedule, and its simulation; times in ms."""
    say(f"paced steps, {name}")
    schedule, costs = paced_schedule(name)
    expected = simulate(schedule, costs)
    steps = []
    for _ in range(PACED_STEPS):
        traces = world.run(paced_step, schedule, pace=pp.pace_of(costs, schedule)).traces
        rows = pp.measured_rows(traces)
        steps.append((makespan(rows), bubble(rows)[0], overshoot(traces)))
    seconds, share, late = (median(values) for values in zip(*steps, strict=True))
    return {
        "name": name,
        "simulated_ms": 1e3 * expected.makespan,
        "measured_ms": 1e3 * seconds,
        "ratio": seconds / expected.makespan,
        "bubble_simulated": expected.bubble_of_total,
        "bubble_measured": share,
        "overshoot": late,
    }


def paced_schedule(name: str) -> tuple[Schedule, Costs]:
    """Return the schedule and the costs of a row of :data:`PACED`."""
    schedule, costs = PACED[name]
    return make(schedule, RANKS, PACED_MICRO_BATCHES, costs=costs), costs


def paced_step(schedule: Schedule) -> None:
    """Run one warm-up step, then one step that is traced. Called in a rank."""
    mesh = make_mesh(pp=RANKS)
    stages = pp.make_stages(build_model(PACED_CONFIG), schedule, mesh.pp.rank)
    optimizer = torch.optim.SGD(pp.parameters(stages), lr=1e-3)
    whole = batch(0, seed=0, batch_size=PACED_MICRO_BATCHES, seq_len=32)
    micro_batches = list(zip(*(part.chunk(PACED_MICRO_BATCHES) for part in whole), strict=True))
    for _ in range(2):
        comm.barrier(mesh.pp)
        mesh.trace.clear()
        pp.train_step(schedule, stages, mesh, micro_batches, optimizer)
