"""A configuration: how a model is split over GPUs, and the batch of a step."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.planner.catalog import DTYPES, Dtype, Model

RECOMPUTE = ("none", "selective", "full")
STEP_TOKENS = 2**22  # of the default batch: 4 Mi tokens, as Llama 3's first phase


@dataclass(frozen=True)
class Configuration:
    """The degrees of the axes and the batch; ``world`` = tp x cp x dp x pp, ep divides dp x cp.

    ``zero`` 0 to 3. ``schedule`` is a name of :mod:`course_lib.schedule`, ``chunks`` the stages
    per rank. ``micro_batch`` and ``global_batch`` count sequences of ``seq`` tokens.
    ``sequence_parallel``: on when tp > 1. ``stage_layers`` counts the layers of each stage where
    they are not as even as possible.
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
    chunks: int = 1,
    micro_batch: int = 1,
    global_batch: int | None = None,
    seq: int | None = None,
    recompute: str = "none",
    dtype: str = "bf16",
    stage_layers: tuple[int, ...] | None = None,
) -> Configuration:
    """Return a configuration with what was left out filled in; ValueError if it is impossible.

    dp is what is left of ``gpus``; zero 1 if dp x cp > 1; interleaved if chunks > 1, else 1f1b;
    about 4 Mi tokens per step.
    """
    others = tp * pp * cp
    if dp is None:
        if gpus % others:
            raise ValueError(
                f"expected tp x pp x cp to divide {gpus} GPUs, got {tp} x {pp} x {cp} = {others}"
            )
        dp = gpus // others
    length = model.max_seq_len if seq is None else seq
    rows = dp * micro_batch
    if global_batch is None:
        global_batch = max(1, round(STEP_TOKENS / length / rows)) * rows
    return Configuration(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        ep=ep,
        zero=(1 if dp * cp > 1 else 0) if zero is None else zero,
        schedule=schedule or ("interleaved" if chunks > 1 else "1f1b"),
        chunks=chunks,
        micro_batch=micro_batch,
        global_batch=global_batch,
        seq=length,
        recompute=recompute,
        dtype=DTYPES[dtype],
        sequence_parallel=tp > 1,
        stage_layers=stage_layers,
    )
