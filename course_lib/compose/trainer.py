"""Parallelize a single-process model by one call, and train it on a mesh."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from os import PathLike
from types import SimpleNamespace

import torch
from torch import Tensor

from course_lib import checkpoint, comm, cp, dp, pp, zero
from course_lib.compose.build import BalanceLoss, build_stages
from course_lib.compose.gradients import Gradients
from course_lib.compose.plan import LossScale, Plan
from course_lib.compose.refusals import batch_refusals, discouraged, refusals
from course_lib.formulas.plan import AxisSizes
from course_lib.mesh import Mesh
from course_lib.model import Decoder
from course_lib.trace.memory import StateBytes, state_bytes

Batch = tuple[Tensor, Tensor, Tensor]  # tokens (b, s), targets (b, s), positions (s)


@dataclass(frozen=True)
class Step:
    """What a step says, alike on all ranks.

    ``loss``: the mean over all tokens, auxiliary losses included; ``norm``: that of the whole
    gradient, before clipping; ``updated``: False where the loss scale was too large (and the loss
    itself may be infinite).
    """

    loss: Tensor
    norm: Tensor
    updated: bool


class Scale:
    """The factor of the loss, step after step. All ranks see the same norms, so they agree."""

    def __init__(self, rule: LossScale | None) -> None:
        self.rule = rule
        self.value = 1.0 if rule is None else rule.initial
        self._good = 0

    def allows(self, norm: Tensor) -> bool:
        """Whether gradients of this norm may be used; the next scale follows from it."""
        if self.rule is None:
            return True
        fine, interval = bool(norm.isfinite()), self.rule.growth_interval
        self._good = self._good + 1 if fine else 0
        if interval is not None:
            grows = fine and self._good % interval == 0
            self.value *= 2.0 if grows else 1.0 if fine else 0.5
        return fine

    def progress(self) -> dict[str, float]:
        """What a checkpoint must know; a scale that never changes is the plan's."""
        if self.rule is None or self.rule.growth_interval is None:
            return {}
        return {"loss scale": self.value, "good steps": self._good}

    def resume(self, progress: Mapping[str, float]) -> None:
        """Go on from there."""
        if self.progress():
            self.value = progress.get("loss scale", self.value)
            self._good = int(progress.get("good steps", self._good))


class Trainer:
    """This rank's part of the model and of its training. Make one with :func:`parallelize`.

    ``stages`` are this rank's by number, ``{0: model}`` without a pipeline.
    """

    def __init__(
        self, model: Decoder, mesh: Mesh, plan: Plan, make_optimizer: zero.MakeOptimizer
    ) -> None:
        self.mesh, self.plan, self.config = mesh, plan, model.config
        self.schedule = plan.schedule_for(mesh.pp.size) if mesh.pp.size > 1 else None
        self.stages = build_stages(model, self.schedule, mesh, plan)
        self.gradients = Gradients(self.stages, self.schedule, mesh, plan, make_optimizer)
        self.scale = Scale(plan.loss_scale)
        self.balance = BalanceLoss(self.stages, mesh, plan)
        self.steps = 0
        self._broke_off = ""  # why there can be no next step

    def step(self, tokens_BS: Tensor, targets_BS: Tensor) -> Step:
        """One optimizer step on the rows of this rank's dp replica.

        All ranks of a replica (tp, cp, pp) give the same whole sequences: positions and
        micro-batches are cut here. Raises ValueError for a batch that cannot be cut, before
        anything is sent. After any other exception make a new mesh and a new trainer and load a
        checkpoint: messages of a pipeline and buckets under way cannot be taken back, so that
        where there are any the next step is a RuntimeError.
        """
        if self._broke_off:
            raise RuntimeError(self._broke_off)
        batches = self._cut(tokens_BS, targets_BS)
        tokens = self._tokens_of_all(targets_BS) / self.scale.value
        with self._remembers_errors():
            return self._step(batches, tokens)

    def _step(self, batches: Sequence[Batch], tokens: Tensor) -> Step:
        """The step, each loss being divided by ``tokens``."""
        self.gradients.zero_grad()
        self.balance.start(tokens)
        with self._masks():
            run = self._without_pipeline if self.schedule is None else self._in_pipeline
            own = run(batches, tokens)
        self.steps += 1
        held = self.gradients.complete()
        for one in held if self.plan.loss_scale else ():
            one.gradient.div_(self.scale.value)
        norm = self.gradients.norm(held)
        loss = self._loss_of_all(own)
        updated = self.scale.allows(norm)
        if updated:
            if self.plan.max_norm is not None:
                comm.clip_grad_norm(held, [self.mesh.world], self.plan.max_norm, norm)
            self.gradients.update()
        return Step(loss, norm, updated)

    @contextmanager
    def _remembers_errors(self) -> Iterator[None]:
        """What breaks a step off while something is under way breaks the trainer."""
        try:
            yield
        except BaseException as error:
            if self.schedule is not None or self.plan.overlap:
                self._broke_off = (
                    f"a step of this trainer broke off ({type(error).__name__}: {error}), and "
                    "messages or buckets that it had under way would be taken for those of the "
                    "next step: make a new mesh and a new trainer, and load a checkpoint"
                )
            raise

    def _tokens_of_all(self, targets_BS: Tensor) -> Tensor:
        """By which every rank divides its loss: never by its own tokens, with a mean after."""
        return dp.global_tokens([targets_BS], self.mesh.dp).double()

    def _cut(self, tokens_BS: Tensor, targets_BS: Tensor) -> list[Batch]:
        """Micro-batches (tokens, targets, positions) of this rank's positions."""
        sizes = AxisSizes(**self.mesh.layout.sizes, ep=self.mesh.layout.ep)
        refuse(batch_refusals(self.config, sizes, self.plan, *tokens_BS.shape))
        layout = self.plan.layout if self.mesh.cp.size > 1 else cp.CONTIGUOUS
        tokens, targets, positions = cp.shard(tokens_BS, targets_BS, self.mesh.cp, layout)
        m = self.plan.micro_batches
        cut = zip(tokens.tensor_split(m), targets.tensor_split(m), strict=True)
        return [(*pair, positions) for pair in cut]

    def _without_pipeline(self, batches: Sequence[Batch], tokens: Tensor) -> Tensor:
        """Forward and backward of each micro-batch; this rank's part of the loss, scaled."""
        model, total = self.stages[0], torch.zeros_like(self.balance.total)
        for index, (x, targets, positions) in enumerate(batches):
            last = index + 1 == len(batches)
            with self.mesh.compute("F", stage=0, mb=index):
                loss = model.cross_entropy(model(x, positions), targets)[0] / tokens
            with (
                nullcontext() if last else self.gradients.accumulate(),
                self.mesh.compute("B", stage=0, mb=index),
            ):
                loss.backward()
            total += loss.detach()
        return total

    def _in_pipeline(self, batches: Sequence[Batch], tokens: Tensor) -> Tensor:
        """The same by the engine; 0 but on the last stage."""
        schedule = self.schedule
        assert schedule is not None
        last = schedule.stages - 1

        def share(logits: Tensor, targets: Tensor) -> Tensor:
            return self.stages[last].cross_entropy(logits, targets)[0] / tokens

        with self.gradients.accumulate():  # hooks cannot tell which backward is the last
            done = pp.run(
                schedule,
                self.stages,
                self.mesh,
                batches,
                share,
                on_stage_done=self.gradients.stage_done,
                sum_tied=False,  # that is done after the sum over dp, of shards under ZeRO
            )
        return done.loss

    def _loss_of_all(self, own: Tensor) -> Tensor:
        """Sum of all ranks' parts (control); those of tp have the cross-entropy in common."""
        part = own / self.mesh.tp.size + self.balance.total
        return comm.all_reduce(part, self.mesh.world, control=True) / self.scale.value

    @contextmanager
    def _masks(self) -> Iterator[None]:
        """Dropout's masks follow from seed, step and place: ranks of tp, which hold the same
        activations, drop the same (where they share rows RankDropout sees to it), others do not.
        """
        if not self.config.dropout:
            yield
            return
        mesh = self.mesh
        place = mesh.dp_cp.rank * mesh.pp.size + mesh.pp.rank
        seed = hash((self.plan.seed, self.steps, place))  # of numbers, so the same everywhere
        devices = [mesh.device] if mesh.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            yield

    def save(self, path: str | PathLike[str]) -> None:
        """Write weights, optimizer state, steps taken and loss scale. Call it on every rank.

        To be loaded under any mesh and any plan for the same model and optimizer.
        """
        progress = {"steps": float(self.steps), **self.scale.progress()}
        checkpoint.save(path, self.stages, self.optimizers, self.mesh, progress)

    def load(self, path: str | PathLike[str]) -> None:
        """Read them back. Call it on every rank.

        Under the same mesh and plan the next step is that of a training that never stopped, bit
        for bit. A checkpoint that was not saved by a trainer says nothing of steps and loss scale:
        then both stay as they are, with a warning on rank 0. A static scale is always the plan's.
        """
        progress = checkpoint.load(path, self.stages, self.optimizers, self.mesh)
        self.steps = int(progress.get("steps", self.steps))
        self.scale.resume(progress)
        missing = [key for key in ("steps", *self.scale.progress()) if key not in progress]
        if missing and self.mesh.rank == 0:
            warnings.warn(
                f"the checkpoint {path} does not say {' and '.join(missing)}: they stay as they "
                "are in this trainer",
                stacklevel=2,
            )

    @property
    def optimizers(self) -> list[checkpoint.Optimizer]:
        """One for each part of the parameters."""
        return [part.optimizer for part in self.gradients.parts]

    @property
    def state_bytes(self) -> StateBytes:
        """Bytes that this rank stores between steps, for all its stages and optimizers."""
        inner = [o.optimizer if isinstance(o, zero.Sharded) else o for o in self.optimizers]
        everything = SimpleNamespace(
            state={parameter: state for o in inner for parameter, state in o.state.items()},
            param_groups=[group for o in inner for group in o.param_groups],
        )
        return state_bytes(self.stages.values(), everything)


def parallelize(
    model: Decoder, mesh: Mesh, plan: Plan, make_optimizer: zero.MakeOptimizer
) -> Trainer:
    """Partition the single-process ``model`` for this rank of ``mesh`` and return its trainer.

    ``model`` is changed: use the trainer instead. Call it on every rank, with equal weights.
    ``make_optimizer(parameters)`` is called for each group of parameters that is summed over other
    ranks, under ZeRO for their shards. Raises ValueError with every reason where this cannot be
    done, and warns (on rank 0) of what can be and should not.
    """
    sizes = {**mesh.layout.sizes, "ep": mesh.layout.ep}
    refuse(refusals(model.config, sizes, plan))
    for sentence in discouraged(model.config, sizes, plan) if mesh.rank == 0 else ():
        warnings.warn(sentence, stacklevel=2)
    return Trainer(model, mesh, plan, make_optimizer)


def refuse(reasons: Iterable[str]) -> None:
    """Raise ValueError with all reasons, if there are any."""
    if found := list(reasons):
        raise ValueError("this combination does not work:\n- " + "\n- ".join(found))
