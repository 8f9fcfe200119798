"""A configuration: the degrees by which a model is split over GPUs, and the batch of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate, pairwise
from math import lcm
from typing import Any

from course_lib.formulas.pp import partition
from course_lib.planner.catalog import DTYPES, Dtype, Model
from course_lib.schedule import placement
from course_lib.schedule.named import CHUNKS, SCHEDULES, V_SHAPED

RECOMPUTE = ("none", "selective", "full")
ONE_STAGE = ("1f1b", "zb-h1", "zb-h2")  # schedules in which a rank has one stage
# Above these a number is a mistake, and a plan would take minutes.
MOST_GPUS, MOST = 2**20, 2**30
COUNTS = dict.fromkeys(("gpus", "tp", "pp", "cp", "dp", "ep", "chunks"), MOST_GPUS)
COUNTS |= dict.fromkeys(("micro_batch", "global_batch", "seq"), MOST)
# Bytes per parameter of weights, gradients and optimizer state, in training with 16-bit weights.
RECIPES = {16: (2, 2, 12), 18: (2, 4, 12), 20: (2, 2, 16)}
STEP_TOKENS = 2**22  # of the default batch: 4 Mi tokens, as Llama 3's first phase


@dataclass(frozen=True)
class Configuration:
    """The degrees of the axes and the batch; ``world`` = tp x cp x dp x pp, ep divides dp x cp.

    ``zero`` 0 to 3. ``schedule`` is a name of :mod:`course_lib.schedule`, ``chunks`` the stages
    per rank. ``micro_batch`` and ``global_batch`` count sequences of ``seq`` tokens.
    ``sequence_parallel``: on when tp > 1. ``stage_layers`` counts the layers of each stage where
    they are not as even as possible, in the order in which a micro-batch passes the pp x chunks
    stages. ``recipe``: bytes per parameter, 16, 18 or 20 (:func:`planner.memory.state_bytes`).
    ``fused_attention``: the kernel saves no scores for backward (FlashAttention). ``gather_again``:
    sequence parallelism saves shards of inputs, and backward gathers them again. ``overlap_tp``:
    kernels cut the products into pieces, which hides most of the communication of tp.
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
    gather_again: bool = True
    overlap_tp: bool = False

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
    overlap_tp: bool = False,
) -> Configuration:
    """Return a configuration, with defaults for missing arguments; ValueError if it is impossible.

    Defaults: dp = ``gpus`` / (tp x cp x pp); zero 1 if dp x cp > 1; interleaved if chunks > 1, else
    1f1b; two chunks for a schedule that needs them; about 4 Mi tokens per step.
    """
    counts = {
        "gpus": gpus,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "dp": dp,
        "ep": ep,
        "chunks": chunks,
        "micro_batch": micro_batch,
        "global_batch": global_batch,
        "seq": seq,
    }
    check_counts(counts)
    for kind, asked, known in (
        ("schedule", schedule, SCHEDULES),
        ("recompute", recompute, RECOMPUTE),
        ("dtype", dtype, DTYPES),
    ):
        if asked is not None and asked not in known:
            raise ValueError(f"no {kind} is called {asked!r}; {suggestion(asked, known)}")
    others = tp * pp * cp
    if gpus % (others * (dp or 1)) or (dp is not None and others * dp != gpus):
        product = f"{tp} x {pp} x {cp}" + (f" x {dp}" if dp else "")
        rule = "tp x pp x cp x dp to be" if dp else "tp x pp x cp to divide"
        raise ValueError(
            f"expected {rule} {gpus} GPUs, got {product} = {others * (dp or 1)}; change a degree "
            "or the number of GPUs" + (", or leave out dp" if dp else "")
        )
    dp = gpus // others
    schedule = schedule or ("interleaved" if (chunks or 1) > 1 else "1f1b")
    length = model.max_seq_len if seq is None else seq
    rows = dp * micro_batch
    if global_batch is None:
        global_batch = max(1, round(STEP_TOKENS / length / rows)) * rows
    made = Configuration(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        ep=ep,
        zero=(1 if dp * cp > 1 else 0) if zero is None else zero,
        schedule=schedule,
        chunks=(CHUNKS.get(schedule, 1) if pp > 1 else 1) if chunks is None else chunks,
        micro_batch=micro_batch,
        global_batch=global_batch,
        seq=length,
        recompute=recompute,
        dtype=DTYPES[dtype],
        sequence_parallel=tp > 1,
        stage_layers=None if stage_layers is None else tuple(stage_layers),
        recipe=recipe,
        fused_attention=fused_attention,
        overlap_tp=overlap_tp,
    )
    for problem in impossible(model, made):
        raise ValueError(problem)
    return made


def check_counts(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for a count or a degree that is no whole number from 1 to what is sensible.

    Arguments of other kinds and those that are None are skipped.
    """
    for name, most in COUNTS.items():
        count = arguments.get(name)
        if count is not None and (type(count) is not int or not 1 <= count <= most):
            raise ValueError(
                f"expected a whole number from 1 to {most:,} as {name}, got {name}={count!r}"
            )


def stages_of(model: Model, configuration: Configuration) -> list[tuple[int, range]]:
    """Return pipeline rank and layers of each virtual stage."""
    ranks = placement(configuration.schedule, configuration.pp, configuration.chunks)
    counts = configuration.stage_layers or partition(model.layers, len(ranks))
    ends = [0, *accumulate(counts)]
    return [(rank, range(*at)) for rank, at in zip(ranks, pairwise(ends), strict=True)]


def outer_ranks(model: Model, configuration: Configuration) -> list[int]:
    """Return pipeline ranks, one of which stores most and one of which sends most.

    Where all layers are alike and spread evenly, the ranks between the second and the last two
    have as many layers as the second, or fewer, and no more in flight.
    """
    p = configuration.pp
    if model.experts is not None or configuration.stage_layers is not None:
        return list(range(p))
    return sorted({0, min(1, p - 1), max(p - 2, 0), p - 1})


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a clause with the nearest of the ``known`` names, or with all of them."""
    known = list(known)
    near = get_close_matches(name, known, n=3, cutoff=0.4)
    if near and len(known) > 4:
        return f"did you mean {' or '.join(near)}?"
    return f"choose {', '.join(known[:-1])} or {known[-1]}" if known[1:] else f"choose {known[0]}"


def impossible(model: Model, plan: Configuration) -> Iterator[str]:
    """Yield why ``plan`` cannot train ``model``, if it cannot. Memory is not checked."""
    yield from _splits(model, plan)
    yield from _stages(model, plan)
    if plan.zero not in range(4):
        yield f"expected zero from 0 to 3, got zero={plan.zero}; 0 shards nothing"
    if plan.recipe not in RECIPES:
        yield f"expected recipe=16, 18 or 20 bytes per parameter, got recipe={plan.recipe}"
    rows = plan.dp * plan.micro_batch
    if plan.global_batch % rows:
        yield (
            f"expected dp x micro_batch = {plan.dp} x {plan.micro_batch} = {rows} to divide the "
            f"global batch, got global_batch={plan.global_batch}; choose a multiple of {rows}"
            + (", lower micro_batch" if plan.micro_batch > 1 else "")
            + (", or raise tp, cp or pp, which lowers dp" if plan.dp > 1 else "")
        )


def _splits(model: Model, plan: Configuration) -> Iterator[str]:
    """Check heads, features, experts and positions against tp, ep and cp."""
    experts = model.experts  # routed experts stay whole
    ffn = 0 if experts and not experts.dense_layers else model.ffn
    shared_ffn = experts.ffn if experts and experts.shared else 0
    for name, size in (
        ("heads", model.heads),
        ("features of the MLP (ffn)", ffn),
        ("features of a shared expert", shared_ffn),
    ):
        if size % plan.tp:
            yield (
                f"expected tp to divide {size} {name}, got tp={plan.tp}; choose "
                f"{_divisors(size, 2 * plan.tp)}"
            )
    shared = 0 if model.latent else model.kv_heads
    if shared % plan.tp and plan.tp % max(shared, 1):
        yield (
            f"expected tp to divide {shared} key and value heads or to be a multiple of them, got "
            f"tp={plan.tp}; choose {_divisors(shared, 2 * plan.tp)}, or a multiple of {shared}"
        )
    data = plan.dp * plan.cp
    if plan.ep > 1 and model.experts is None:
        yield f"expected ep=1, as {model.name} has no experts, got ep={plan.ep}; leave it out"
    elif data % plan.ep:
        yield (
            f"expected ep to divide dp x cp = {data}, got ep={plan.ep}; choose "
            f"{_divisors(data, 2 * plan.ep)}"
        )
    elif model.experts and model.experts.number % plan.ep:
        yield (
            f"expected ep to divide {model.experts.number} experts, got ep={plan.ep}; choose "
            f"{_divisors(model.experts.number, 2 * plan.ep)}"
        )
    multiple = lcm(2 * plan.cp if plan.cp > 1 else 1, plan.cp * plan.tp)
    if plan.seq % multiple:
        yield (
            f"expected seq to be a multiple of {multiple} (zig-zag chunks of cp={plan.cp}, rows of "
            f"tp={plan.tp}), got seq={plan.seq}; pad it to {-(-plan.seq // multiple) * multiple}"
        )


def _stages(model: Model, plan: Configuration) -> Iterator[str]:
    """Check layers, chunks and the schedule against pp."""
    stages = plan.pp * plan.chunks
    if plan.pp == 1 and plan.chunks > 1:
        yield f"expected chunks=1 without a pipeline, got chunks={plan.chunks}; raise pp"
    elif stages > model.layers:
        yield (
            f"expected at most {model.layers} stages, one per layer, got pp x chunks = {plan.pp} x "
            f"{plan.chunks} = {stages}; lower one of them"
        )
    if plan.schedule in ONE_STAGE and plan.chunks > 1:
        yield (
            f"expected chunks=1 for {plan.schedule}, got chunks={plan.chunks}; choose the schedule "
            "interleaved"
        )
    if plan.schedule in V_SHAPED and plan.chunks != 2 and plan.pp > 1:
        yield (
            f"expected chunks=2 for {plan.schedule}, got chunks={plan.chunks}; choose 2, or leave "
            "it out"
        )
    layers = plan.stage_layers
    if layers is None:
        return
    if len(layers) != stages or sum(layers) != model.layers or min(layers) < 1:
        listed = ", ".join(map(str, layers[:32])) + (", ..." if len(layers) > 32 else "")
        yield (
            f"expected stage_layers of pp x chunks = {stages} stages, one layer or more each and "
            f"{model.layers} in all, got {listed}: {len(layers)} stages with {sum(layers)} layers"
        )


def _divisors(number: int, most: int) -> str:
    """Return the divisors of ``number`` up to ``most`` as words: 1, 2 or 4."""
    found = [str(n) for n in range(1, min(number, most) + 1) if number % n == 0]
    return " or ".join([", ".join(found[:-1]), found[-1]]) if len(found) > 1 else found[0]
