"""The levels of the plan arena: a model, a batch, a cluster with emulated links, a memory limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from course_lib.planner import Configuration, Hardware, Link, Model, configure
from course_lib.planner.catalog import FP64, Experts
from course_lib.planner.configuration import stages_of
from course_lib.planner.estimate import estimate
from course_lib.planner.exact import exact_memory
from course_lib.planner.flops import blocks_flops, head_flops
from course_lib.planner.result import Estimate

if TYPE_CHECKING:
    from course_lib.grading.plans.ranks import Job
    from course_lib.mesh import Links

UNEVEN = 2  # saved activations with experts, over those of even routing
SIMULATED = 30  # plans of a search
CHOICES = "tp cp pp dp ep zero schedule chunks micro_batch recompute".split()
CLOSE = 1e-5  # seconds: smaller differences of steps count as rounding
PEAK = 1e8  # FLOP/s of a rank: a block's forward of one sequence is padded to about 60 ms
SCHEDULES = (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2))
SPLIT = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")  # I and W are padded apart
FAST, SLOW = Link(12e6, 5e-5), Link(1.2e6, 2e-4)  # inside a node, and between nodes


class Pace(NamedTuple):
    """Seconds of padding: (forward, backward) of a block and of the head, and W of each stage."""

    block: tuple[float, float]
    head: tuple[float, float]
    weights: dict[tuple[str, int], float]


def toy(**changes: Any) -> Model:
    """Return the model of the levels, in float64, with ``changes``."""
    sizes: dict[str, Any] = {
        "name": "toy",
        "family": "llama",
        "layers": 4,
        "hidden": 64,
        "heads": 8,
        "kv_heads": 4,
        "ffn": 192,
        "vocab": 256,
        "max_seq_len": 64,
        "head_dim": 8,
        "dtype": FP64,
        "source": "the model of the lessons",
    }
    return Model(**{**sizes, **changes})


@dataclass(frozen=True)
class Level:
    """A planning task: ``sequences`` of ``seq`` tokens per step on ``ranks`` in nodes."""

    number: int
    title: str
    task: str
    model: Model
    ranks: int
    per_node: int
    limit_bytes: int
    sequences: int
    bars: tuple[float, float, float]  # seconds: the middle of all plans, par, the best
    seq: int = 64
    node: Link = FAST
    network: Link = SLOW

    @property
    def hardware(self) -> Hardware:
        """The cluster as the planner sees it: a rank is a GPU whose memory is the limit."""
        return Hardware(
            name=f"level {self.number}",
            capacity_bytes=self.limit_bytes,
            memory_bandwidth=1e15,
            gpus_per_node=self.per_node,
            peak={"fp64": PEAK},
            node=self.node,
            network=self.network,
            efficiency={"fp64": 1.0},
            source="emulated",
            emulated=True,
        )

    def plan(self, **choices: Any) -> Configuration:
        """Return the configuration of a learner's choices.

        Raises ValueError if it is impossible or sets what the level fixes, and TypeError for other
        arguments of the planner, such as ``overlap_tp``, which the ranks do not implement.
        """
        fixed: dict[str, Any] = {"global_batch": self.sequences, "seq": self.seq, "dtype": "fp64"}
        taken = sorted(fixed.keys() & choices.keys())
        if taken:
            raise ValueError(
                f"expected a plan without {taken[0]}, which the level fixes; leave it out"
            )
        for name in choices:
            if name not in CHOICES:
                raise TypeError(
                    f"{name} is not a choice of the plan arena; choose from {', '.join(CHOICES)}"
                )
        plan = configure(self.model, self.ranks, **fixed, **choices)
        if plan.recompute == "selective" or (plan.pp > 1 and plan.recompute == "full"):
            raise ValueError(
                f"expected recompute=none, or full with pp=1, got recompute={plan.recompute} and "
                f"pp={plan.pp}: the levels count memory to the byte, which other values do not "
                "allow"
            )
        return replace(plan, gather_again=False)

    def predict(self, plan: Configuration, *, simulated: bool = True) -> Estimate:
        """Return the planner's estimate of ``plan`` on this cluster, with memory to the byte."""
        found = estimate(self.model, self.hardware, plan, reserve=0.0, simulated=simulated)
        stages = [exact_memory(self.model, plan, stage) for stage in range(plan.pp)]
        if self.model.experts:
            stages = [replace(one, activations=UNEVEN * one.activations) for one in stages]
        held = max(stages, key=lambda one: one.total)
        missing = held.total - self.limit_bytes
        reasons: tuple[str, ...] = ()
        if missing > 0:
            parts = asdict(held)
            largest = max(parts, key=lambda name: parts[name])
            reasons = (
                f"the plan needs {held.total / 1e6:.3f} MB per rank, {missing / 1e6:.3f} MB more "
                f"than the limit; the largest part is {largest}, {parts[largest] / 1e6:.3f} MB",
            )
        return replace(
            found, memory=held, fits=missing <= 0, headroom_bytes=-missing, reasons=reasons
        )

    def pace(self, plan: Configuration) -> Pace:
        """Return the padding of compute: the planner's FLOPs over the peak."""
        tokens = plan.micro_batch * plan.seq / plan.cp / plan.tp
        block = tokens * blocks_flops(self.model, plan.seq, [0]).total / PEAK
        head = tokens * head_flops(self.model) / PEAK
        split = plan.schedule in SPLIT and plan.pp > 1
        times = 1 if split else 3 if plan.recompute == "full" else 2
        weights = {}
        for stage, (_, layers) in enumerate(stages_of(self.model, plan) if split else ()):
            last = stage + 1 == plan.pp * plan.chunks
            weights["W", stage] = len(layers) * block + last * head
        return Pace((block, times * block), (head, (1 if split else 2) * head), weights)

    def legal(self) -> Iterator[Configuration]:
        """Yield the configurations of the search: those that the planner and the library accept.

        Schedules are 1F1B, ZB-H1 and interleaved with two chunks, micro-batches 1, 2, 4 and 8.
        """
        degrees = [d for d in range(1, self.ranks + 1) if self.ranks % d == 0]
        experts = degrees if self.model.experts else [1]
        for tp, cp, pp, ep in product(degrees, degrees, degrees, experts):
            if self.ranks % (tp * cp * pp):
                continue
            for zero, (schedule, chunks), rows, recompute in product(
                (0, 1, 2, 3) if self.ranks > tp * pp else (0,),
                SCHEDULES if pp > 1 else SCHEDULES[:1],
                (1, 2, 4, 8),
                ("none", "full") if pp == 1 else ("none",),
            ):
                try:
                    plan = self.plan(
                        tp=tp, cp=cp, pp=pp, ep=ep, zero=zero, schedule=schedule, chunks=chunks,
                        micro_batch=rows, recompute=recompute,
                    )  # fmt: skip
                except ValueError:
                    continue
                if not self.refusals(plan):
                    yield plan

    def search(self) -> tuple[list[Estimate], tuple[float, float, float]]:
        """Return the plans of :meth:`legal` that fit, the shortest step first, and the bars.

        All plans are ranked by formula; the first 30 and the middle one are simulated.
        """
        found = [self.predict(plan, simulated=False) for plan in self.legal()]
        found = sorted((one for one in found if one.fits), key=lambda one: one.step_seconds)
        middle = self.predict(found[len(found) // 2].configuration).step_seconds
        first = [self.predict(one.configuration) for one in found[:SIMULATED]]
        first.sort(key=lambda one: one.step_seconds)
        best = first[0].step_seconds
        return first + found[SIMULATED:], (middle, (middle + best) / 2, best)

    def stars(self, step: float) -> int:
        """Return 1 star for a plan that runs, and one more for each bar that its step reaches."""
        return 1 + sum(step <= bar + CLOSE for bar in self.bars)

    def refusals(self, plan: Configuration) -> list[str]:
        """Return why the library cannot run ``plan``, in sentences."""
        from course_lib import compose

        job = self.job
        sizes, how = self.in_library(plan)
        return compose.refusals(job.config, sizes, how, sequences=plan.sequences, seq_len=self.seq)

    @property
    def job(self) -> Job:
        """The training job of the ranks."""
        import torch

        from course_lib import compose
        from course_lib.grading.plans.ranks import Job
        from course_lib.model import ModelConfig

        names = "family layers hidden heads kv_heads ffn vocab max_seq_len tied dropout".split()
        config = ModelConfig(
            **{name: getattr(self.model, name) for name in names}, dtype=torch.float64
        )
        experts = self.model.experts
        return Job(
            config,
            self.sequences,
            self.seq,
            compose.Experts(experts.number, experts.top_k, coefficient=0.0) if experts else None,
        )

    def in_library(self, plan: Configuration) -> tuple[dict[str, int], Any]:
        """Return ``plan`` as the mesh's sizes and a :class:`course_lib.compose.Plan`."""
        from course_lib import compose, recompute, sp, tp

        sizes = {"tp": plan.tp, "cp": plan.cp, "dp": plan.dp, "pp": plan.pp, "ep": plan.ep}
        how = compose.Plan(
            zero=plan.zero,
            overlap=plan.zero == 0,
            region=sp.REGION if plan.tp > 1 else tp.REGION,
            schedule=plan.schedule,
            chunks=plan.chunks if plan.pp > 1 else None,
            micro_batches=plan.micro_batches,
            experts=self.job.experts,
            recompute=recompute.full if plan.recompute == "full" else None,
        )
        return sizes, how

    @property
    def links(self) -> Links:
        """The links that the launcher emulates."""
        from course_lib import mesh

        inside, between = (
            mesh.Link(link.latency, link.bandwidth) for link in (self.node, self.network)
        )
        return mesh.Links(inside, between, self.per_node)

    def __str__(self) -> str:
        """Return the description of the level for a learner."""
        nodes, (middle, par, best) = self.ranks // self.per_node, self.bars
        where = f"{nodes} nodes of {self.per_node} ranks" if nodes > 1 else "one node"
        speed = f"{self.node.bandwidth / 1e6:g} MB/s between ranks"
        if nodes > 1:
            speed = f"{speed} of a node, {self.network.bandwidth / 1e6:g} MB/s between nodes"
        return (
            f"Level {self.number}, {self.title}: {self.task}\n"
            f"  {self.ranks} ranks in {where}; {speed}\n"
            f"  batch of {self.sequences} x {self.seq} tokens per step, at most "
            f"{self.limit_bytes / 1e6:g} MB of state and saved activations per rank\n"
            f"  middle plan {middle:.3f} s, par {par:.3f} s, best of the search {best:.3f} s"
        )


LEVELS = (
    Level(1, "DP does not fit", "the training state of the model exceeds the memory of a rank.",
          toy(), 4, 4, 5_000_000, 8, bars=(2.57141, 2.16651, 1.76161)),
    Level(2, "two sequences", "four ranks share a batch of two sequences.",
          toy(), 4, 4, 8_000_000, 2, bars=(0.67368, 0.56553, 0.45739)),
    Level(3, "one long sequence", "attention of 512 tokens, and one sequence per step.",
          toy(max_seq_len=512), 4, 4, 20_000_000, 1, seq=512, bars=(3.85734, 3.34908, 2.84082)),
    Level(4, "two nodes", "the network is ten times slower than the links of a node.",
          toy(), 8, 4, 4_000_000, 8, bars=(2.41611, 1.78210, 1.14809)),
    Level(5, "experts", "eight experts per layer, two per token.",
          toy(experts=Experts(8, 2, 192)), 8, 4, 14_000_000, 8, bars=(4.51221, 3.14681, 1.78141)),
    Level(6, "five axes", "sixteen ranks in four nodes, experts and long sequences.",
          toy(max_seq_len=256, experts=Experts(8, 2, 192)), 16, 4, 12_000_000, 4, seq=256,
          bars=(6.70410, 5.09430, 3.48450)),
)  # fmt: skip


def level(number: int) -> Level:
    """Return a level by its number. Raises ValueError with the valid numbers."""
    for one in LEVELS:
        if one.number == number:
            return one
    raise ValueError(f"expected a level from 1 to {len(LEVELS)}, got {number!r}")
