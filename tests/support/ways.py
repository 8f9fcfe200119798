"""Ways to hold a model on ranks, what each rank then holds, and a training that goes through it.

What a rank *should* hold is made without the code under test: the single-process model is given
the values (of the weights, or of a moment), and is cut. Cutting is linear: what becomes of a weight
becomes of its moments. Functions with a mesh run on ranks.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from course_lib import checkpoint, dp, ep, pp, tp, zero
from course_lib.data import batch
from course_lib.mesh import Mesh, make_mesh
from course_lib.model import Decoder, ModelConfig, build_model
from course_lib.schedule import Schedule, from_rows, gpipe, looped, v_shape

SEQ, BATCH = 8, 8
COUNT = 7.0  # steps in a state that is drawn
EXPERTS, COEFFICIENT = 8, 0.05
SIZES = {"layers": 4, "hidden": 48, "heads": 24, "ffn": 24, "max_seq_len": SEQ}
# 257 and 259 leave padding on 2, 3, 4 and 8 ranks; of 2 heads of keys 4 and 8 ranks share one.
LLAMA = ModelConfig(**SIZES, kv_heads=2, vocab=257, dtype=torch.float64)
GPT = ModelConfig(**SIZES, kv_heads=24, vocab=259, family="gpt", tied=True, dtype=torch.float64)
MOE = replace(LLAMA, layers=2, hidden=24, heads=4, ffn=12)


@dataclass(frozen=True)
class Way:
    """A mesh and what is done with it; ``placement`` of stages on ranks, () without a pipeline.

    ``zero`` is 0 for one plain optimizer. ``layers`` of each stage, None for as even as can be.
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    placement: tuple[int, ...] = ()
    ep: int = 1
    zero: int = 0
    layers: tuple[int, ...] | None = None

    @property
    def pp(self) -> int:
        return 1 + max(self.placement, default=0)

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    def mesh(self) -> Mesh:
        return make_mesh(dp=self.dp, tp=self.tp, cp=self.cp, pp=self.pp, ep=self.ep)

    def __str__(self) -> str:
        sizes = {"dp": self.dp, "tp": self.tp, "cp": self.cp, "ep": self.ep, "zero": self.zero}
        parts = [f"{name}{size}" for name, size in sizes.items() if size > (name != "zero")]
        parts += ["pp" + "".join(map(str, self.placement))] if self.placement else []
        parts += ["uneven"] if self.layers else []
        return "-".join(parts) or "serial"


V_ROWS = from_rows(
    [
        "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1".split(),
        "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1".split(),
    ]
)
SERIAL = Way()
LOOPED, V = Way(placement=looped(2, 2)), Way(placement=v_shape(2))
WAYS = {
    LLAMA: [
        SERIAL,
        *(Way(dp=4, zero=stage) for stage in (0, 1, 2, 3)),
        Way(dp=8, zero=3),
        *(Way(tp=size) for size in (2, 4, 8)),
        *(Way(tp=2, dp=2, zero=stage) for stage in (1, 2, 3)),
        Way(tp=4, dp=2, zero=1),
        Way(cp=2, dp=2, zero=2),
        *(Way(placement=looped(size)) for size in (2, 3, 4)),
        Way(placement=looped(2), layers=(3, 1)),
        LOOPED,
        V,
        Way(placement=(1, 0, 1)),
        Way(placement=looped(2), tp=2, dp=2, zero=2),
        Way(placement=looped(2), dp=2, zero=3),
    ],
    GPT: [
        SERIAL,
        Way(dp=3, zero=3),
        *(Way(tp=size) for size in (2, 3, 4)),
        Way(tp=2, dp=2, zero=1),
        Way(tp=3, dp=2, zero=3),
        LOOPED,
        V,
        Way(placement=looped(2), dp=3, zero=1),
        Way(placement=v_shape(2), dp=2, zero=2),
        Way(placement=looped(4), tp=2),
        Way(placement=looped(2), tp=2, dp=2, zero=1),
    ],
    MOE: [
        SERIAL,
        *(Way(dp=4, ep=size) for size in (1, 2, 4)),
        Way(dp=8, ep=8),
        *(Way(dp=4, ep=2, zero=stage) for stage in (1, 2)),
        Way(dp=2, zero=3),
        Way(dp=2, ep=2, tp=2),
        Way(dp=4, ep=2, placement=looped(2), zero=1),
        Way(placement=looped(2)),
    ],
}
NAMES = {LLAMA: "llama", GPT: "gpt-tied", MOE: "moe"}


def serial_model(config: ModelConfig, seed: int = 3) -> Decoder:
    model = build_model(config, seed=seed)
    if config == MOE:
        ep.add_experts(model, EXPERTS, 2, shared=True, seed=seed)
    return model


def draw(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Values for every weight of the single-process model, none of them 0."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(p.shape, generator=generator, dtype=p.dtype) + 0.5
        for name, p in serial_model(config).named_parameters()
    }


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@dataclass
class Job:
    """What a rank is given: stages, optimizers for the checkpoint, and what sums gradients."""

    mesh: Mesh
    stages: dict[int, Decoder]
    optimizers: list
    sync: Any
    schedule: Schedule | None

    @property
    def model(self) -> Any:
        """As the checkpoint is given it."""
        return self.stages[0] if self.schedule is None else self.stages

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return pp.parameters(self.stages)

    @contextmanager
    def whole(self):
        """Inside, parameters that ZeRO-3 holds in shards are there."""
        gathered = [z.gathered() for z in self.optimizers if isinstance(z, zero.Zero3)]
        for each in gathered:
            each.__enter__()
        yield
        for each in gathered:
            each.__exit__(None, None, None)


def schedule_of(way: Way) -> Schedule | None:
    """One with the way's placement; only looped ones and the V of two ranks can be trained."""
    if not way.placement:
        return None
    for schedule in (gpipe(way.pp, 2, len(way.placement) // way.pp), V_ROWS):
        if schedule.placement == way.placement:
            return schedule
    return Schedule("by placement", ((),) * way.pp, way.placement)


def make(way: Way, model: Decoder, mesh: Mesh | None = None, optimizer: Any = adam) -> Job:
    """The serial ``model`` held in this way."""
    mesh, schedule = mesh or way.mesh(), schedule_of(way)
    experts = any(isinstance(module, ep.MoE) for module in model.modules())
    if experts:
        ep.parallelize(model, mesh.ep, mesh.dp_cp)
    if way.tp > 1:
        plan = tp.plan_for(model)
        cuts = {key: cut for key, cut in plan.items() if not (experts and ".ffn" in key)}
        tp.parallelize(model, mesh.tp, plan=cuts)
    stages = pp.make_stages(model, schedule, mesh.pp.rank, way.layers) if schedule else {0: model}
    mine = torch.nn.ModuleList(stages.values())

    def sum_or_shard(parameters: Any, axis: Any) -> Any:
        if way.zero == 0:
            return dp.Bucketed(parameters, axis)
        return {1: zero.Zero1, 2: zero.Zero2}[way.zero](parameters, axis, optimizer, 20_000)

    if way.zero == 3:
        zs = [zero.Zero3(s, list(s.blocks), mesh.dp_cp, optimizer) for s in stages.values()]
        return Job(mesh, stages, zs, zs[0], schedule)
    if experts:
        sync = ep.ExpertSync(mine, sum_or_shard, ep=mesh.ep, edp=mesh.edp, data=mesh.dp_cp)
        syncs = list(sync.syncs)
    else:
        sync = sum_or_shard(pp.parameters(stages), mesh.dp_cp)
        syncs = [sync]
    return Job(mesh, stages, syncs if way.zero else [optimizer(mine.parameters())], sync, schedule)


def held_with(way: Way, config: ModelConfig, seed: int, mesh: Mesh) -> Job:
    """A job whose weights are those drawn from ``seed``."""
    model = serial_model(config)
    model.load_state_dict(draw(config, seed), strict=False)
    if config.tied:
        assert model.head.weight is model.embedding.token.weight
    return make(way, model, mesh)


def inner(optimizer: Any) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, zero.Sharded) else optimizer


def state_of(job: Job) -> dict[torch.Tensor, dict]:
    """The state of everything that is updated, to be read and to be written."""
    found = {}
    for optimizer in map(inner, job.optimizers):
        for group in optimizer.param_groups:
            found |= {values: optimizer.state[values] for values in group["params"]}
    return found


def truth(way: Way, config: ModelConfig, seed: int = 0) -> Job:
    """A job with drawn weights and drawn state, as it should be after a load."""
    mesh = way.mesh()
    job, *moments = (held_with(way, config, seed + number, mesh) for number in range(3))
    values = [list(state_of(each)) for each in (job, *moments)]
    states = state_of(job)
    for weight, first, second in zip(*values, strict=True):
        states[weight] |= {
            "step": torch.tensor(COUNT),
            "exp_avg": first.detach().clone(),
            "exp_avg_sq": second.detach().clone(),
        }
    return job


def spoil(job: Job) -> None:
    """Other values everywhere, in the padding of a vocabulary too."""
    with torch.no_grad():
        for optimizer in job.optimizers:
            for flat in optimizer.flats if isinstance(optimizer, zero.Sharded) else ():
                for _, _, run in flat.parameter_slices(flat.shard.data):
                    run.fill_(99.0)
        if not any(isinstance(each, zero.Zero3) for each in job.optimizers):
            for parameter in job.parameters:
                parameter.fill_(99.0)


def differences(got: Job, want: Job) -> list[str]:
    """Where a bit differs between two jobs of one way: weights, what is updated, its state."""
    found = []
    with got.whole(), want.whole():
        pairs = zip(got.parameters, want.parameters, strict=True)
        found += [f"weight {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    got_state, want_state = state_of(got), state_of(want)
    for number, (mine, theirs) in enumerate(zip(got_state, want_state, strict=True)):
        ours, others = (
            {"updated": v, **s[v]} for v, s in ((mine, got_state), (theirs, want_state))
        )
        assert ours.keys() == others.keys(), f"state of {number}: {list(ours)}"
        found += [f"{key} {number}" for key in ours if not torch.equal(ours[key], others[key])]
    return found


def local(job: Job) -> list[torch.Tensor]:
    """All bits that this rank holds."""
    with job.whole():
        found = [parameter.detach().clone() for parameter in job.parameters]
    for values, state in state_of(job).items():
        found += [values.detach().clone(), *(state[key].clone() for key in sorted(state))]
    return found


def save_truth(way: Way, config: ModelConfig, path: str) -> None:
    job = truth(way, config)
    checkpoint.save(path, job.model, job.optimizers, job.mesh)


def load_and_compare(way: Way, config: ModelConfig, path: str, target: str | None = None):
    """Differences from the truth after a load, and another save from here if ``target`` says so."""
    job = make(way, serial_model(config, seed=99))
    spoil(job)
    checkpoint.load(path, job.model, job.optimizers, job.mesh)
    found = differences(job, truth(way, config))
    if target is not None:
        checkpoint.save(target, job.model, job.optimizers, job.mesh)
    return found


def rows(step: int, rank: int = 0, size: int = 1):
    return batch(step, seed=7, batch_size=BATCH, seq_len=SEQ, dp_rank=rank, dp_size=size)


class Together:
    """Several optimizers as one, for a train step."""

    def __init__(self, optimizers: list) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()

    def step(self) -> None:
        for each in self.optimizers:
            each.step()


def train(job: Job, first: int, end: int) -> None:
    """Steps ``first`` to ``end - 1``."""
    for step in range(first, end):
        if job.schedule is not None:
            micro = list(zip(*(part.chunk(2) for part in rows(step)), strict=True))
            pp.train_step(job.schedule, job.stages, job.mesh, micro, job.optimizers[0])
            continue
        model = job.stages[0]
        experts = any(isinstance(module, ep.MoE) for module in model.modules())
        loss = ep.loss_sum(model, COEFFICIENT) if experts else model.loss_sum
        mine = rows(step, job.mesh.dp.rank, job.mesh.dp.size)
        dp.train_step(loss, [mine], job.sync, Together(job.optimizers))
