"""One process, and what a rank does under ZeRO: the same model, rows and AdamW, step by step."""

from __future__ import annotations

from functools import cache

import torch
from equality import assert_bitwise, assert_equal

from course_lib import comm, dp, zero
from course_lib.data import batch
from course_lib.mesh import make_mesh
from course_lib.model import ModelConfig, build_model

BATCH, SEQ, STEPS = 24, 12, 5
SMALL = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "max_seq_len": SEQ}
F64 = ModelConfig(**SMALL, dtype=torch.float64)
GPT = ModelConfig(**(SMALL | {"kv_heads": 4}), family="gpt", tied=True, dtype=torch.float64)
BF16 = ModelConfig(**(SMALL | {"ffn": 25}), dtype=torch.bfloat16)
BUCKET_BYTES = 4_000  # several buckets even for these small models
STAGES = (1, 2, 3)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def make(stage, model, axis, **options):
    """ZeRO of ``stage`` with the units and buckets of these tests."""
    if stage == 3:
        return zero.Zero3(model, list(model.blocks), axis, adam, **options)
    kind = (zero.Zero1, zero.Zero2)[stage - 1]
    return kind(model.parameters(), axis, adam, BUCKET_BYTES, **options)


def build(config, frozen=()):
    model = build_model(config, seed=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(tuple(frozen))))
    return model


def rows(step, rank=0, size=1, shortest=None):
    return batch(
        step, seed=7, batch_size=BATCH, seq_len=SEQ, dp_rank=rank, dp_size=size, shortest=shortest
    )


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@cache
def serial(config, *, max_norm=None, shortest=None, frozen=(), steps=STEPS):
    """Return (losses, first gradients, weights) of the single-process reference, a plain loop."""
    model = build(config, frozen)
    optimizer = adam([p for p in model.parameters() if p.requires_grad])
    losses, first = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        total, count = model.loss_sum(*rows(step, shortest=shortest))
        (total / count).backward()
        first = first or {k: p.grad.clone() for k, p in model.named_parameters() if p.requires_grad}
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(float(total.detach() / count))
    return losses, first, weights(model)


@cache
def accumulated(config, size, steps=STEPS):
    """The reference that sums the ranks' shards one after another, in the master's precision.

    Under ZeRO the sums associate in this very way, so that not one bit may differ.
    (first gradients, masters).
    """
    model = build(config)
    parameters = dict(model.named_parameters())
    masters = {
        name: torch.nn.Parameter(p.detach().to(torch.promote_types(p.dtype, torch.float32)))
        for name, p in parameters.items()
    }
    optimizer, first = adam(masters.values()), {}
    for step in range(steps):
        optimizer.zero_grad()
        tokens = rows(step)[1].numel()
        for rank in range(size):
            (model.loss_sum(*rows(step, rank, size))[0] / tokens).backward()
            for name, parameter in parameters.items():
                grad, before = parameter.grad.to(masters[name].dtype), masters[name].grad
                masters[name].grad = grad if before is None else before + grad
                parameter.grad = None
        first = first or {name: master.grad.clone() for name, master in masters.items()}
        optimizer.step()
        for name, parameter in parameters.items():
            parameter.data.copy_(masters[name])
    return first, {name: master.detach() for name, master in masters.items()}


def whole(z, model, of):
    """What the ranks hold in shards, as tensors of the parameters' shapes, by name."""
    found = {}
    for flat in z.flats:
        full = comm.all_gather(of(flat.shard), flat.axis)
        found.update(zip(flat.parameters, flat.views(full), strict=True))
    return {name: found[p] for name, p in model.named_parameters() if p in found}


def gradients(z, model):
    return whole(z, model, lambda shard: shard.grad)


def masters(z, model):
    return whole(z, model, lambda shard: shard.detach())


def trained(z, model):
    """All weights, the frozen ones too."""
    if isinstance(z, zero.Zero3):
        with z.gathered():
            return weights(model)
    return weights(model)


def train(
    stage,
    config,
    *,
    micro=1,
    max_norm=None,
    shortest=None,
    frozen=(),
    steps=STEPS,
    step=dp.train_step,
    make=make,
    prepare=None,
    **options,
):
    """What one rank does: (losses, first gradients, weights, bytes sent in each step)."""
    mesh = make_mesh()
    model = build(config, frozen)
    if prepare is not None:
        prepare(model)
    z = make(stage, model, mesh.dp, **options)
    losses, first, sent = [], {}, []
    for number in range(steps):
        mine = rows(number, mesh.dp.rank, mesh.dp.size, shortest)
        cut = list(zip(*(part.chunk(micro) for part in mine), strict=True))
        mesh.ledger.clear()
        losses.append(float(step(model.loss_sum, cut, z, z, max_norm)))
        sent.append(mesh.ledger.wire_bytes())
        first = first or gradients(z, model)
    final = trained(z, model)
    z.close()
    return losses, first, final, sent


def check(results, twin, tolerance=1e-12, after=1e-8):
    """Compare every rank with the reference, and the ranks with each other."""
    losses, first, final = twin
    for rank, (got_losses, got_first, got_final, _) in enumerate(results):
        assert max(abs(a - b) for a, b in zip(got_losses, losses, strict=True)) < tolerance * 10
        assert_equal(got_first, first, tolerance, f"gradients of rank {rank}")
        assert_equal(got_final, final, after, f"weights of rank {rank} after {STEPS} AdamW steps")
        assert_bitwise(got_final, results[0][2], f"rank {rank} against rank 0")


def elements(stage, model):
    """Trained elements of each flat, counted anew from the model."""
    if stage < 3:
        buckets = comm.by_dtype_and_size(
            [p for p in model.parameters() if p.requires_grad][::-1], BUCKET_BYTES
        )
        return [sum(p.numel() for p in bucket) for bucket in buckets]
    units = [sum(p.numel() for p in b.parameters() if p.requires_grad) for b in model.blocks]
    return [sum(p.numel() for p in model.parameters() if p.requires_grad) - sum(units), *units]
