"""What the tests of composition share: one process and a plain loop, what a rank of a mesh does,
and what all ranks hold joined to the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from equality import assert_bitwise, assert_equal
from torch import Tensor

from course_lib import comm, compose, ep
from course_lib.checkpoint.boxes import names_in_whole
from course_lib.compose import Experts, Plan
from course_lib.data import batch
from course_lib.mesh import make_mesh
from course_lib.model import Decoder, ModelConfig, build_model
from course_lib.zero import Sharded, Zero3

SEQ, BATCH, STEPS = 16, 8, 5
SMALL = {"layers": 4, "hidden": 16, "heads": 4, "kv_heads": 4, "ffn": 24, "max_seq_len": SEQ}
F64 = ModelConfig(**SMALL, vocab=257, dtype=torch.float64)
TIED = ModelConfig(**SMALL, family="gpt", tied=True, vocab=257, dtype=torch.float64)
MOE = Experts(number=4, top_k=2, coefficient=0.05)


def build(config: ModelConfig, experts: Experts | None = None) -> Decoder:
    """Return the single-process model; biases are not 0 and norms not 1, so that mistakes show."""
    model = build_model(config, seed=3)
    if experts is not None:
        ep.add_experts(
            model,
            experts.number,
            experts.top_k,
            capacity_factor=experts.capacity_factor,
            shared=experts.shared,
            seed=4,
        )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter.dtype), alpha=0.3)
    return model


def adam(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def rows(step: int, rank: int = 0, size: int = 1) -> tuple[Tensor, Tensor]:
    """Rows of random length: every replica, and every piece of a sequence, has other counts."""
    return batch(
        step, seed=7, batch_size=BATCH, seq_len=SEQ, dp_rank=rank, dp_size=size, shortest=5
    )


@dataclass
class Trained:
    """What a training leaves. On a rank, ``weights`` and ``gradients`` are its pieces."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Any]  # of the first step, before clipping
    weights: dict[str, Any]
    sent: dict[str, Fraction] = field(default_factory=dict)  # by axis, in the last step
    leaving: int = 0  # pairs of a token and an expert elsewhere, in the last step


@cache
def serial(
    config: ModelConfig,
    experts: Experts | None = None,
    *,
    micro_batches: int = 1,
    replicas: int = 1,
    max_norm: float | None = None,
    steps: int = STEPS,
) -> Trained:
    """Train the single-process reference. Its micro-batch k joins the k-th ones of all replicas:
    only the auxiliary loss, which is no sum over tokens, depends on this."""
    model = build(config, experts)
    optimizer, result = adam(list(model.parameters())), Trained([], [], {}, {})
    for step in range(steps):
        optimizer.zero_grad()
        count = (rows(step)[1] != -100).sum()
        shares = [
            [x.tensor_split(micro_batches) for x in rows(step, r, replicas)]
            for r in range(replicas)
        ]
        loss = 0.0
        for k in range(micro_batches):
            tokens, targets = (torch.cat([share[i][k] for share in shares]) for i in (0, 1))
            total, _ = model.loss_sum(tokens, targets)
            if experts is not None:
                total = total + experts.coefficient * ep.auxiliary_loss(model)
            (total / count).backward()
            loss += float(total.detach() / count)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        result.gradients = result.gradients or {n: g.clone() for n, g in gradients.items()}
        result.norms.append(float(torch.nn.utils.get_total_norm(gradients.values())))
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        result.losses.append(loss)
    result.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return result


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor: number ``place`` of ``places`` along ``dim``."""

    values: Tensor
    dim: int | None
    place: int
    places: int


def pieces(trainer: compose.Trainer, of: Callable[[Tensor], Tensor | None]) -> dict[str, Piece]:
    """``of`` every parameter on this rank, by its name in the whole model."""
    found = {}
    for parameter, name in names_in_whole(trainer.stages).items():
        value = of(parameter)
        if value is not None:
            spec = comm.shard_spec(parameter)
            dim = None if spec is None else spec.dim
            place = (0, 1) if spec is None or dim is None else (spec.index, spec.shards)
            found[name] = Piece(value.detach().clone(), dim, *place)
    return found


def joined(results: Sequence[Mapping[str, Piece]], like: Mapping[str, Tensor], what: str):
    """The whole tensors. What several ranks hold is the same on each, bit for bit."""
    parts: dict[str, dict[int, Piece]] = {}
    for rank, held in enumerate(results):
        for name, piece in held.items():
            known = parts.setdefault(name, {}).setdefault(piece.place, piece)
            where = f"{what} of rank {rank}"
            assert_bitwise({name: piece.values}, {name: known.values}, where)
    whole = {}
    for name, by_place in parts.items():
        some = by_place[0]
        assert sorted(by_place) == list(range(some.places)), f"{name}: {sorted(by_place)}"
        tensor = some.values
        if some.dim is not None:
            tensor = torch.cat([by_place[i].values for i in range(some.places)], some.dim)
        if tensor.shape != like[name].shape:  # the vocabulary's padding
            assert not tensor[len(like[name]) :].any(), f"padding of {name} is not 0"
            tensor = tensor[: len(like[name])]
        whole[name] = tensor
    return whole


def gradients_of(trainer: compose.Trainer) -> dict[Tensor, Tensor]:
    """The whole gradient (of this rank's part) of each parameter, shards joined."""
    found: dict[Tensor, Tensor] = {}
    for part in trainer.gradients.parts:
        if isinstance(part.sync, Sharded):
            for flat in part.sync.flats:
                full = comm.all_gather(flat.shard.grad, flat.axis)
                found.update(zip(flat.parameters, flat.views(full), strict=True))
        else:
            found.update({p: p.grad for p in part.parameters})
    return found


def trained(
    sizes: Mapping[str, int],
    plan: Plan,
    config: ModelConfig,
    change: Callable[[compose.Trainer], None] | None = None,
    steps: int = STEPS,
) -> Trained:
    """What one rank does. ``change`` may break the trainer before it starts."""
    mesh = make_mesh(**sizes)
    trainer = compose.parallelize(build(config, plan.experts), mesh, plan, adam)
    if change is not None:
        change(trainer)
    result, norm = Trained([], [], {}, {}), trainer.gradients.norm

    def norm_after_copying(held):
        if not result.gradients:
            result.gradients = pieces(trainer, gradients_of(trainer).get)
        return norm(held)

    trainer.gradients.norm = norm_after_copying
    leaving: list[int] = []
    for layer in [m for stage in trainer.stages.values() for m in stage.modules()]:
        if isinstance(layer, ep.MoE):
            layer.register_forward_hook(lambda layer, *_: leaving.append(pairs_leaving(layer)))
    for number in range(steps):
        if number == steps - 1:
            mesh.ledger.clear()
            leaving.clear()
        step = trainer.step(*rows(number, mesh.dp.rank, mesh.dp.size))
        result.losses.append(float(step.loss))
        result.norms.append(float(step.norm))
    result.leaving = sum(leaving) // plan.block_forwards
    axes = {record.axis for record in mesh.ledger.select()}
    result.sent = {axis: mesh.ledger.wire_bytes(axis) for axis in axes}
    result.weights = weights_of(trainer)
    return result


def pairs_leaving(layer: ep.ExpertParallelMoE) -> int:
    """Pairs of this rank's tokens whose expert is on another rank."""
    counts, own = layer.load.kept[layer.ep.rank], len(layer.experts)
    mine = range(layer.ep.rank * own, (layer.ep.rank + 1) * own)
    return sum(count for expert, count in enumerate(counts) if expert not in mine)


def weights_of(trainer: compose.Trainer) -> dict[str, Piece]:
    """This rank's pieces of the weights, gathered where ZeRO-3 shards them."""
    for part in trainer.gradients.parts:
        if isinstance(part.sync, Zero3):
            with part.sync.gathered():
                return pieces(trainer, lambda p: p)
    return pieces(trainer, lambda p: p)


def check(results: Sequence[Trained], twin: Trained, tolerance: float = 1e-12) -> None:
    """Compare all ranks with the reference, and with each other."""
    for rank, got in enumerate(results):
        for what in ("losses", "norms"):
            for mine, theirs in zip(getattr(got, what), getattr(twin, what), strict=True):
                error = abs(mine / theirs - 1)
                assert error < 10 * tolerance, f"{what} of rank {rank} are off by {error:.3g}"
    gradients = joined([got.gradients for got in results], twin.gradients, "gradients")
    assert_equal(gradients, twin.gradients, tolerance, "gradients")
    weights = joined([got.weights for got in results], twin.weights, "weights")
    assert_equal(weights, twin.weights, 1e-8, "weights")


def check_bytes(
    results: Sequence[Trained], sizes: Mapping[str, int], plan: Plan, config: ModelConfig
) -> None:
    """What all ranks sent in the last step against the formula, axis by axis, exactly."""
    counted: dict[str, Fraction] = {}
    for got in results:
        for axis, sent in got.sent.items():
            counted[axis] = counted.get(axis, Fraction(0)) + sent
    leaving = sum(got.leaving for got in results)
    replica = BATCH // sizes.get("dp", 1)
    assert counted == compose.wire_bytes(config, sizes, plan, replica, SEQ, leaving=leaving)


def check_way(world: Any, sizes: Mapping[str, int], plan: Plan, config: ModelConfig) -> None:
    """Train on a mesh; compare with the reference and the formula."""
    results = world.run(trained, sizes, plan, config)
    check(results, twin_of(sizes, plan, config))
    check_bytes(results, sizes, plan, config)


def twin_of(
    sizes: Mapping[str, int], plan: Plan, config: ModelConfig, steps: int = STEPS
) -> Trained:
    """The serial training that equals the plan's."""
    balanced = plan.experts is not None  # else micro-batches and replicas make no difference
    return serial(
        config,
        plan.experts,
        micro_batches=plan.micro_batches if balanced else 1,
        replicas=sizes.get("dp", 1) if balanced else 1,
        max_norm=plan.max_norm,
        steps=steps,
    )
