"""`course bench pp`: our GPipe and 1F1B beside torch's, and paced steps beside simulated ones.

All contestants live in the same four processes and train their own copy of one model of 4.7 M
parameters (vocabulary of 4 hidden sizes; large models have 8) on the same batches. ``torch 1f1b
again`` is a second one: its ratio to the first is the noise. By default torch's last stage keeps
the logits of all micro-batches to return them; ``torch 1f1b, lean`` is told not to.

Real arithmetic of four ranks on two cores hides bubbles: the paced steps, where ranks sleep
instead of competing, show those.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from course_lib import comm, pp
from course_lib.bench.rounds import interleave, ratios, slowest_rank, timed
from course_lib.data import batch
from course_lib.launch import World
from course_lib.mesh import Mesh, make_mesh
from course_lib.model import ModelConfig, build_model
from course_lib.schedule import Costs, bubble, make, makespan, simulate
from course_lib.trace import TOO_BUSY, PeakLiveBytes, overshoot

CONFIG = ModelConfig(
    layers=4, hidden=256, heads=8, kv_heads=8, ffn=1024, vocab=1024, max_seq_len=64
)
PACED_CONFIG = ModelConfig(layers=4)  # small: its arithmetic must fit into the pace
RANKS, MICRO_BATCHES, PACED_MICRO_BATCHES = 4, 16, 8
PACE = {"F": 0.02, "B": 0.04}
PACED = ("naive", "gpipe", "1f1b")
PACED_STEPS = 3
ALARM = 1.25
TORCH = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
Step = Callable[[int], None]


def measure(rounds: int = 20) -> dict:
    """Medians of milliseconds a step, ratios to torch, last-stage peaks, paced / simulated."""
    with World(RANKS) as world:
        by_rank = world.run(_time_ranks, rounds, timeout=120 + 10 * rounds)
        paced = [_paced(world, name) for name in PACED]
    times = slowest_rank([seconds for seconds, _ in by_rank])
    peaks = by_rank[-1][1]
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
    """Torch's contestant for the same schedule."""
    return "torch gpipe" if "gpipe" in name else "torch 1f1b"


def text(result: dict) -> str:
    """The result as two tables."""
    return "\n".join([*_beside_torch(result), "", *_beside_simulation(result["paced"])])


def _beside_torch(result: dict) -> list[str]:
    lines = [
        f"Pipelines beside torch's: {result['ranks']} ranks, {result['micro_batches']} "
        f"micro-batches, {result['parameters'] / 1e6:.1f} M parameters, {result['rounds']} rounds",
        f"{'':<18}{'ms a step':>10}{'to torch':>10}{'last-stage peak MB':>20}{'to torch':>10}",
    ]
    for name, milliseconds in result["milliseconds"].items():
        slower, more = (result[key].get(name) for key in ("ratio_to_torch", "peak_ratio_to_torch"))
        shown = "1" if slower is None else f"{slower:.2f}"
        peak = result["last_stage_peak_bytes"][name] / 1e6
        memory = "1" if more is None else f"{more:.2f}"
        lines.append(f"{name:<18}{milliseconds:>10.1f}{shown:>10}{peak:>20.2f}{memory:>10}")
    if result["ratio_to_torch"]["1f1b"] > ALARM:
        lines.append(f"1f1b takes more than {ALARM} times as long as torch's: something is wrong")
    return [
        *lines,
        "Peak: bytes made during a step and alive at once; parameters and gradients are there "
        "before and not in it.",
        "'torch 1f1b again' against 'torch 1f1b' is the noise of this measurement.",
    ]


def _beside_simulation(paced: list[dict]) -> list[str]:
    lines = [
        f"Paced, {PACED_MICRO_BATCHES} micro-batches, F {PACE['F'] * 1e3:.0f} ms and B "
        f"{PACE['B'] * 1e3:.0f} ms, median of {PACED_STEPS} steps",
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
        lines.append("Sleeps overshoot by more than 10 %: too busy, compare order and not time.")
    return lines


# --- real arithmetic ------------------------------------------------------------------------


def _time_ranks(rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of every contestant, and its peak of live bytes on this rank."""
    mesh = make_mesh(pp=RANKS)
    steps = {name: contestant(mesh) for name, contestant in _CONTESTANTS.items()}
    times = interleave({name: timed(step, mesh) for name, step in steps.items()}, rounds)
    peaks = {}
    for name, step in steps.items():
        with PeakLiveBytes() as live:
            step(0)
        peaks[name] = live.peak
    return times, peaks


def _inputs(step: int) -> pp.Batch:
    return batch(step % 4, seed=0, batch_size=MICRO_BATCHES, seq_len=CONFIG.max_seq_len)


def _ours(name: str, mesh: Mesh) -> Step:
    schedule = make(name, RANKS, MICRO_BATCHES)
    stages = pp.cut(build_model(CONFIG), schedule, mesh.pp.rank)
    optimizer = torch.optim.SGD(pp.parameters(stages), lr=1e-3)

    def step(number: int) -> None:
        whole = _inputs(number)
        cut = list(zip(*(part.chunk(MICRO_BATCHES) for part in whole), strict=True))
        optimizer.zero_grad(set_to_none=False)
        pp.run(schedule, stages, mesh, cut, lambda y, t: _mean_loss(y, t) / MICRO_BATCHES)
        optimizer.step()

    return step


def _torchs(name: str, mesh: Mesh, return_outputs: bool = True) -> Step:
    ours = make(name, RANKS, MICRO_BATCHES)
    module = pp.cut(build_model(CONFIG), ours, mesh.pp.rank)[mesh.pp.rank]
    stage = PipelineStage(module, mesh.pp.rank, RANKS, mesh.device)
    schedule = TORCH[name](stage, MICRO_BATCHES, loss_fn=_mean_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step(number: int) -> None:
        tokens, targets = _inputs(number)
        optimizer.zero_grad(set_to_none=False)
        given = [tokens] if mesh.pp.rank == 0 else []
        target = targets if mesh.pp.rank == RANKS - 1 else None
        schedule.step(*given, target=target, return_outputs=return_outputs)
        optimizer.step()

    return step


def _mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


_CONTESTANTS: dict[str, Callable[[Mesh], Step]] = {
    "torch gpipe": partial(_torchs, "gpipe"),
    "gpipe": partial(_ours, "gpipe"),
    "torch 1f1b": partial(_torchs, "1f1b"),
    "1f1b": partial(_ours, "1f1b"),
    "torch 1f1b again": partial(_torchs, "1f1b"),
    "torch 1f1b, lean": partial(_torchs, "1f1b", return_outputs=False),
}


# --- paced ----------------------------------------------------------------------------------


def _paced(world: World, name: str) -> dict:
    """Paced steps of one schedule beside its simulation, medians; times in ms."""
    schedule = make(name, RANKS, PACED_MICRO_BATCHES)
    expected = simulate(schedule, Costs.make(f=PACE["F"], b=PACE["B"]))
    steps = []
    for _ in range(PACED_STEPS):
        traces = world.run(paced_step, name, pace=PACE).traces
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


def paced_step(name: str) -> None:
    """What a rank does: one step to warm up, then one that its trace holds alone."""
    mesh = make_mesh(pp=RANKS)
    schedule = make(name, RANKS, PACED_MICRO_BATCHES)
    stages = pp.cut(build_model(PACED_CONFIG), schedule, mesh.pp.rank)
    optimizer = torch.optim.SGD(pp.parameters(stages), lr=1e-3)
    whole = batch(0, seed=0, batch_size=PACED_MICRO_BATCHES, seq_len=32)
    micro_batches = list(zip(*(part.chunk(PACED_MICRO_BATCHES) for part in whole), strict=True))
    for _ in range(2):
        comm.barrier(mesh.pp)
        mesh.trace.clear()
        pp.train_step(schedule, stages, mesh, micro_batches, optimizer)
