"""What the tests of tensor and sequence parallelism share: a way, a training, what was cut joined.

Functions with a mesh run on ranks; the others are the single-process reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from equality import assert_bitwise, assert_equal
from torch import Tensor

from course_lib import comm, recompute, sp, tp
from course_lib.comm.operators import Region
from course_lib.data import batch
from course_lib.mesh import Axis, Mesh, make_mesh
from course_lib.model import Decoder, ModelConfig, build_model
from course_lib.tp import formulas

WORLDS = (1, 2, 3, 4, 8)
BATCH, SEQ, STEPS = 2, 24, 5
KV_HEADS = {1: 8, 2: 8, 3: 6, 4: 2, 8: 2}  # fewer than the ranks on 4 and 8
RECOMPUTE = {"full": recompute.full, "selective": recompute.selective}


def sizes(n: int = 2, **changes: Any) -> ModelConfig:
    """A model that 1, 2, 3, 4 and 8 ranks can cut, with a vocabulary that they cannot."""
    given = {"layers": 2, "hidden": 48, "heads": 24, "kv_heads": KV_HEADS[n], "ffn": 48}
    given |= {"max_seq_len": SEQ, "vocab": 259, "dtype": torch.float64}
    return ModelConfig(**(given | changes))


def identity(plan: Mapping) -> Mapping:
    return plan


@dataclass(frozen=True)
class Way:
    """One way to cut a model, and what it costs a rank by its formulas."""

    region: Region
    plan: Callable[[Mapping], Mapping] = identity
    again: bool = False

    @property
    def by_rows(self) -> bool:
        return self.region.rows is not tp.REGION.rows

    def cut(self, model: Decoder, axis: Axis) -> Decoder:
        return tp.parallelize(model, axis, self.region, self.plan(tp.plan_for(model)))

    def wire_bytes(self, config: ModelConfig, sequences: int, n: int, forwards: int = 1):
        if not self.by_rows:
            return formulas.wire_bytes(config, sequences, SEQ, n, forwards=forwards)
        loss = formulas.loss_bytes(config, sequences * SEQ, n)
        activations = sp.wire_bytes(config, sequences, SEQ, n, again=self.again, forwards=forwards)
        return activations + loss + formulas.shared_head_bytes(config, n)

    def saved_per_block(self, config: ModelConfig, sequences: int, n: int) -> int:
        if not self.by_rows:
            return formulas.saved_per_block(config, sequences, SEQ, n)
        return sp.saved_per_block(config, sequences, SEQ, n, again=self.again)


TP = Way(tp.REGION)
SP = Way(sp.REGION)
AGAIN = Way(sp.GATHER_AGAIN, again=True)
RINGS = Way(sp.REGION, tp.overlapped)
BY_ROWS = {"keep": SP, "again": AGAIN, "rings": RINGS}


def disturbed(config: ModelConfig, frozen: tuple[str, ...] = ()) -> Decoder:
    """Return the single-process model; biases are not 0 and norms not 1, so that mistakes show."""
    model = build_model(config, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter.dtype), alpha=0.3)
            parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    return model


def tokens_of(step: int, config: ModelConfig, sequences: int = BATCH, mesh: Mesh | None = None):
    """A batch in which some targets count for nothing."""
    dp = (mesh.dp.rank, mesh.dp.size) if mesh else (0, 1)
    tokens, targets = batch(step, seed=7, batch_size=sequences, seq_len=SEQ)
    targets = targets.clone()
    targets[0, 3:7] = targets[-1, -2:] = -100
    rows = slice(dp[0] * sequences // dp[1], (dp[0] + 1) * sequences // dp[1])
    return tokens[rows], targets[rows]


def joined(model: torch.nn.Module, axis: Axis, of: Callable[[Tensor], Tensor | None]):
    """``of`` every parameter, by name, with the ranks' parts joined and no rank holding twice."""
    whole = {}
    for name, parameter in model.named_parameters():
        value = of(parameter)
        if value is None:
            continue
        spec = comm.shard_spec(parameter)
        if spec is not None:
            parts = comm.all_gather(value.detach(), axis, spec.dim).chunk(axis.size, spec.dim)
            value = torch.cat(parts[:: spec.copies], spec.dim)
        whole[name] = value.detach().clone()
    return whole


def without_padding(tensors: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Joined tensors in the shapes of the serial ones; what is cut off must be zeros."""
    cut = {}
    for name, tensor in tensors.items():
        rows = like[name].shape[:1].numel()  # 1 of a scalar
        padded = tensor.dim() and len(tensor) > rows
        assert not (padded and tensor[rows:].any()), f"padding of {name} is not 0"
        cut[name] = tensor[:rows] if padded else tensor
    return cut


def held_alike(model: torch.nn.Module, axis: Axis) -> dict[str, Tensor]:
    """Weights of which ranks hold the same: whole ones, and heads that are shared."""
    specs = {name: comm.shard_spec(parameter) for name, parameter in model.named_parameters()}
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if (axis.size if (spec := specs[name]) is None else spec.copies) > 1
    }


@dataclass
class Trained:
    """What a training leaves."""

    losses: list[float]
    gradients: dict[str, Tensor]  # of the first step
    weights: dict[str, Tensor]
    norms: list[float]
    sent: list[Fraction] = field(default_factory=list)
    parameters: int = 0
    alike: dict[str, Tensor] = field(default_factory=dict)
    copies: int = 1


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@cache
def serial(
    config: ModelConfig,
    *,
    steps: int = STEPS,
    sequences: int = BATCH,
    max_norm: float | None = None,
    frozen: tuple[str, ...] = (),
    seed: int = 0,
) -> Trained:
    """Train the single-process reference: a plain loop."""
    model = disturbed(config, frozen)
    optimizer, losses, norms, first = adam(model), [], [], {}
    torch.manual_seed(seed)
    for step in range(steps):
        optimizer.zero_grad()
        total, count = model.loss_sum(*tokens_of(step, config, sequences))
        (total / count).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        first = first or {name: gradient.clone() for name, gradient in gradients.items()}
        norm = torch.nn.utils.get_total_norm(gradients.values())
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(float(total.detach() / count))
        norms.append(float(norm))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Trained(losses, first, weights, norms)


def reduce_gradients(model: torch.nn.Module, axis: Axis, way: Way) -> None:
    """What a step does between the last backward and the optimizer."""
    held = comm.held_gradients(model.parameters())
    tp.sum_shared_gradients(held)
    if way.by_rows:
        sp.sum_gradients(held, axis)


def parallel(
    config: ModelConfig,
    way: Way,
    *,
    steps: int = STEPS,
    sequences: int = BATCH,
    max_norm: float | None = None,
    frozen: tuple[str, ...] = (),
    seed: int = 0,
    recomputed: str | None = None,
    reduce: Callable = reduce_gradients,
    norm: Callable = comm.grad_norm,
) -> Trained:
    """What one rank does; the same as :func:`serial`, and what it sent and holds."""
    mesh = make_mesh(tp=make_mesh().world.size)
    model = way.cut(disturbed(config, frozen), mesh.tp)
    if recomputed:
        RECOMPUTE[recomputed](model)
    optimizer, result = adam(model), Trained([], {}, {}, [])
    torch.manual_seed(seed)
    for step in range(steps):
        optimizer.zero_grad()
        mesh.ledger.clear()
        total, count = model.loss_sum(*tokens_of(step, config, sequences))
        (total / count).backward()
        reduce(model, mesh.tp, way)
        result.sent.append(mesh.ledger.wire_bytes("tp") + mesh.ledger.wire_bytes("tp_kv"))
        assert result.sent[-1] == mesh.ledger.wire_bytes()
        result.gradients = result.gradients or joined(model, mesh.tp, lambda p: p.grad)
        held = comm.held_gradients(model.parameters())
        result.norms.append(float(norm(held, [mesh.tp])))
        if max_norm is not None:
            comm.clip_grad_norm(held, [mesh.tp], max_norm)
        optimizer.step()
        result.losses.append(float(total.detach() / count))
    result.weights = joined(model, mesh.tp, lambda p: p)
    result.alike = held_alike(model, mesh.tp)
    result.copies = max(1, mesh.tp.size // config.kv_heads)
    result.parameters = sum(p.numel() for p in model.parameters())
    return result


def check(
    results: list[Trained], twin: Trained, tolerance: float = 1e-12, after_steps: float = 1e-8
) -> None:
    """Compare every rank with the reference, and the ranks with each other."""
    for rank, got in enumerate(results):
        worst = max(abs(a - b) for a, b in zip(got.losses, twin.losses, strict=True))
        assert worst < 10 * tolerance, f"losses of rank {rank} are off by {worst:.3g}"
        gradients = without_padding(got.gradients, twin.gradients)
        assert_equal(gradients, twin.gradients, tolerance, f"gradients of rank {rank}")
        weights = without_padding(got.weights, twin.weights)
        assert_equal(weights, twin.weights, after_steps, f"weights of rank {rank}")
        for mine, theirs in zip(got.norms, twin.norms, strict=True):
            assert abs(mine / theirs - 1) < 10 * tolerance, f"norm of rank {rank}: {mine}, {theirs}"
    check_copies(results)


def check_copies(results: list[Trained]) -> None:
    """What several ranks hold is the same on each, bit for bit."""
    for rank, got in enumerate(results):
        first = rank // got.copies * got.copies
        for name, weight in got.alike.items():
            shared = ".attn.k." in name or ".attn.v." in name
            other = first if shared else 0
            theirs = {name: results[other].alike[name]}
            assert_bitwise({name: weight}, theirs, f"ranks {rank} and {other} after training")


def along(x: Tensor, axis: Axis, way: Way) -> Tensor:
    """This rank's rows of an activation x_BSD, where the way shares them."""
    return comm.own_shard(x, axis, 1) if way.by_rows else x.detach()


def whole(x: Tensor, axis: Axis, way: Way) -> Tensor:
    """The activation of which this rank has rows."""
    return comm.all_gather(x, axis, 1) if way.by_rows else x.detach()


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)
