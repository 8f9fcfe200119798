"""Shared by the tests of pipelines: the reference, a training, and random schedules.

Functions with a mesh run on ranks; the others are the single-process reference.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from equality import assert_bitwise, assert_equal
from ledgers import unmatched_sends

from course_lib import pp
from course_lib.data import batch
from course_lib.mesh import make_mesh
from course_lib.model import ModelConfig, build_model
from course_lib.schedule import Action, Schedule, validate

WORLDS = (1, 2, 3, 4, 8)
SEQ, STEPS, LAYERS = 12, 5, 8
SMALL = {
    "layers": LAYERS, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "max_seq_len": SEQ
}  # fmt: skip
F64 = ModelConfig(**SMALL, dtype=torch.float64)
GPT = ModelConfig(**(SMALL | {"kv_heads": 4}), family="gpt", tied=True, dtype=torch.float64)
TIED = "embedding.token.weight"


def small(schedule, **changes):
    """A model with a layer for each stage at least."""
    return replace(F64, layers=max(LAYERS, schedule.stages), **changes)


def batches(m, step=0):
    """Micro-batches of 2, 1, 3, 2, ... sequences, with ignored targets."""
    return [
        batch(
            100 * step + mb, seed=7, batch_size=(2, 1, 3)[mb % 3], seq_len=SEQ, shortest=4
        )
        for mb in range(m)
    ]  # fmt: skip


def tokens_of(micro_batches):
    return sum(int((targets != -100).sum()) for _, targets in micro_batches)


def sequences(m):
    return sum(len(tokens) for tokens, _ in batches(m))


def prepare(config, frozen=()):
    model = build_model(config, seed=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    return model


def serial(config, m, steps=STEPS, frozen=()):
    """Return (losses, first gradients, weights) of one process, micro-batch after micro-batch."""
    model = prepare(config, frozen)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, first = [], {}
    for step in range(steps):
        adam.zero_grad()
        tokens, mean = tokens_of(batches(m, step)), 0.0
        for inputs, targets in batches(m, step):
            share = model.loss_sum(inputs, targets)[0] / tokens
            share.backward()
            mean += float(share.detach())
        losses.append(mean)
        first = first or {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        adam.step()
    return losses, first, {name: p.detach().clone() for name, p in model.named_parameters()}


def own(model, stages):
    """This rank's parameters by their names in the whole model."""
    mine = set(pp.parameters(stages))
    return {name: p for name, p in model.named_parameters() if p in mine}


def parallel(schedule, config, *, steps=STEPS, layers=None, frozen=(), step=pp.train_step):
    """What one rank does; as :func:`serial` for its part, and the bytes it sent in each step."""
    mesh = make_mesh(pp=schedule.ranks)
    model = prepare(config, frozen)
    stages = pp.make_stages(model, schedule, mesh.pp.rank, layers)
    adam = torch.optim.AdamW(pp.parameters(stages), lr=1e-2)
    losses, first, sent = [], {}, []
    for number in range(steps):
        before = mesh.ledger.wire_bytes("pp")
        micro_batches = batches(schedule.microbatches, number)
        losses.append(float(step(schedule, stages, mesh, micro_batches, adam)))
        sent.append(int(mesh.ledger.wire_bytes("pp") - before))
        first = first or {
            name: p.grad.clone() for name, p in own(model, stages).items() if p.grad is not None
        }
    weights = {name: p.detach().clone() for name, p in own(model, stages).items()}
    return losses, first, weights, sent


def parallel_twice(schedule, config, frozen=()):
    """Two steps."""
    return parallel(schedule, config, steps=2, frozen=frozen)


def check(results, twin, tolerance=0.0):
    """Compare every rank with the reference (bitwise for tolerance 0), and find all parameters."""
    losses, first, final = twin
    assert {name for result in results for name in result[2]} == final.keys()
    for rank, (got_losses, got_first, got_final, _) in enumerate(results):
        worst = max(abs(a - b) for a, b in zip(got_losses, losses, strict=True))
        assert worst <= (tolerance and 1e-10), f"losses of rank {rank} are off by {worst:.3g}"
        mine = {name: first[name] for name in got_final if name in first}
        assert got_first.keys() == mine.keys(), f"rank {rank}"
        if tolerance == 0:
            assert_bitwise(got_first, mine, f"gradients of rank {rank}")
        elif mine:
            assert_equal(got_first, mine, tolerance, f"gradients of rank {rank}")
        mine = {name: final[name] for name in got_final}
        after = f"weights of rank {rank} after {len(losses)} steps"
        if tolerance == 0:
            assert_bitwise(got_final, mine, after)
        else:
            assert_equal(got_final, mine, 1e-8, after)


def check_bytes(results, schedule, config):
    """Counted and formula, for every step; what was sent was received."""
    activations = sequences(schedule.microbatches) * SEQ * config.hidden * 8
    tied = config.vocab * config.hidden * 8 if config.tied else 0
    formula = pp.wire_bytes(schedule, activations, tied)
    for counted in zip(*(sent for *_, sent in results), strict=True):
        assert sum(counted) == formula
    assert unmatched_sends(results.ledgers) == {}


def random_schedule(seed, placement, m):
    """A random legal order: any ready action may be next. Some backwards are split."""
    draw, stages = random.Random(seed), len(placement)
    rows = [[] for _ in range(max(placement) + 1)]
    ready = [Action("F", 0, mb) for mb in range(m)]
    while ready:
        action = ready.pop(draw.randrange(len(ready)))
        rows[placement[action.stage]].append(action)
        op, stage, mb = action.op, action.stage, action.mb
        if op == "F" and stage + 1 < stages:
            ready.append(Action("F", stage + 1, mb))
        elif op == "F":
            ready.append(Action(draw.choice("BI"), stage, mb))
        elif op != "W" and stage > 0:
            ready.append(Action(draw.choice("BI"), stage - 1, mb))
        if op == "I":
            ready.append(Action("W", stage, mb))
    schedule = Schedule(f"random {seed}", tuple(map(tuple, rows)), placement)
    validate(schedule)
    return schedule
