"""A configuration: how a model is split over GPUs, and the batch of a step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from course_lib.formulas.pp import partition
from course_lib.planner.catalog import DTYPES, Dtype, Model, look_up
from course_lib.planner.checks import LARGEST, check, check_degrees, check_number
from course_lib.schedule import SCHEDULES, placement
from course_lib.schedule.named import CHUNKS

RECOMPUTE = ("none", "selective", "full")
STEP_TOKENS = 2**22  # of the default batch: 4 Mi tokens, as Llama 3's first phase


@dataclass(frozen=True)
class Configuration:
    """The degrees of the axes and the batch; ``world`` = tp x cp x dp x pp, ep divides dp x cp.

    ``zero`` 0 to 3. ``schedule`` is a name of :mod:`course_lib.schedule`, ``chunks`` the stages
    per rank. ``micro_batch`` and ``global_batch`` count sequences of ``seq`` tokens.
    ``sequence_parallel``: on when tp > 1. ``stage_layers`` counts the layers of each stage where
    they are not as even as possible, in the order in which a micro-batch passes the pp x chunks
    stages. ``recipe``: bytes per parameter, 16, 18 or 20 (:func:`planner.memory.state_bytes`).
    ``fused_attention``: the kernel saves no scores for backward (FlashAttention).
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    chunks: int = 1
    micro_batch: int = 1
    global_batch: int = 1
    seq: int = 2048
    recompute: str = "none"
    dtype: Dtype = DTYPES["bf16"]
    sequence_parallel: bool = False
    stage_layers: tuple[int, ...] | None = None
    recipe: int = 18
    fused_attention: bool = True

    @property
    def world(self) -> int:
        """Number of GPUs."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def micro_batches(self) -> int:
        """Micro-batches per replica and step, m."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def sequences(self) -> int:
        """Sequences per replica and step."""
        return self.global_batch // self.dp

    @property
    def tokens(self) -> int:
        """Tokens per step, of all replicas."""
        return self.global_batch * self.seq


def configure(
    model: Model,
    gpus: int,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    dp: int | None = None,
    ep: int = 1,
    zero: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    micro_batch: int = 1,
    global_batch: int | None = None,
    seq: int | None = None,
    recompute: str = "none",
    dtype: str = "bf16",
    stage_layers: tuple[int, ...] | None = None,
    recipe: int = 18,
    fused_attention: bool = True,
) -> Configuration:
    """Return a configuration with what was left out filled in; ValueError if it is impossible.

    dp is what is left of ``gpus``; zero 1 if dp x cp > 1; schedule interleaved if chunks > 1, else
    1f1b; chunks 2 for a schedule that needs several, else 1; about 4 Mi tokens per step.
    """
    check_degrees(gpus, tp, pp, cp, dp, ep)
    name = schedule or ("interleaved" if (chunks or 1) > 1 else "1f1b")
    look_up("schedule", name, SCHEDULES)
    look_up("recomputation", recompute, dict.fromkeys(RECOMPUTE))
    number_format = look_up("dtype", dtype, DTYPES)
    length = model.max_seq_len if seq is None else seq
    check_number("seq", length, LARGEST["seq"])
    check_number("micro_batch", micro_batch, LARGEST["micro_batch"])
    replicas = gpus // (tp * pp * cp) if dp is None else dp
    rows = replicas * micro_batch
    if global_batch is None:
        global_batch = max(1, round(STEP_TOKENS / length / rows)) * rows
    check_number("global_batch", global_batch, LARGEST["global_batch"])
    configuration = Configuration(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=replicas,
        ep=ep,
        zero=(1 if replicas * cp > 1 else 0) if zero is None else zero,
        schedule=name,
        chunks=CHUNKS.get(name, 1) if chunks is None else chunks,
        micro_batch=micro_batch,
        global_batch=global_batch,
        seq=length,
        recompute=recompute,
        dtype=number_format,
        sequence_parallel=tp > 1,
        stage_layers=None if stage_layers is None else tuple(stage_layers),
        recipe=recipe,
        fused_attention=fused_attention,
    )
    check(model, configuration)
    return configuration


def stages_of(model: Model, configuration: Configuration) -> list[tuple[int, range]]:
    """Return pipeline rank and layers of each virtual stage."""
    ranks = placement(configuration.schedule, configuration.pp, configuration.chunks)
    counts = configuration.stage_layers or partition(model.layers, len(ranks))
    ends = [0, *accumulate(counts)]
    return [(rank, range(*at)) for rank, at in zip(ranks, pairwise(ends), strict=True)]
