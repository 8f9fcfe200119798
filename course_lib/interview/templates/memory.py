"""Questions on the bytes of states and activations, and on which configuration fits."""

from __future__ import annotations

from itertools import count
from random import Random

from course_lib.formulas import recompute
from course_lib.interview.questions import Amount, Draw, Template
from course_lib.planner.catalog import BF16, DTYPES, custom_model, model
from course_lib.planner.configuration import Configuration
from course_lib.planner.hardware import hardware
from course_lib.planner.in_flight import in_flight
from course_lib.planner.memory import RECIPES, head_activations, layer_activations, state_bytes

BILLIONS = (3, 7, 8, 13, 30, 34, 70, 180)
LARGE = (30, 70, 180, 405)
GPUS = ("a100-40", "a100-80", "h200")
RECIPE = 16  # of the questions: bf16 weights and gradients, fp32 master weight and two moments


def state(elements: float, zero: int = 0, shards: int = 1) -> float:
    """Return the bytes of states of ``elements`` parameters on one rank."""
    return state_bytes(elements, zero=zero, shards=shards, recipe=RECIPE).total


def no_master(elements: float, zero: int = 0, shards: int = 1) -> float:
    """Return the same without the fp32 master weight."""
    lost = DTYPES["fp32"].itemsize * elements / (shards if zero else 1)
    return state(elements, zero, shards) - lost


def per_parameter() -> dict[str, int]:
    """Return the bytes per parameter of the recipe, for the steps."""
    weights, gradients, optimizer = RECIPES[RECIPE]
    return {"w": weights, "g": gradients, "o": optimizer, "all": sum(RECIPES[RECIPE])}


def states(rng: Random) -> Draw:
    """Ask for all states on one GPU."""
    billions = rng.choice(BILLIONS)
    p = billions * 1e9
    parts = state_bytes(p, recipe=RECIPE)
    mistakes = {
        "no-master": no_master(p),
        "weights-only": parts.weights,
        "no-gradients": parts.total - parts.gradients,
        "no-optimizer": parts.weights + parts.gradients,
    }
    return Draw({"billions": billions}, parts.total, mistakes, per_parameter())


def optimizer(rng: Random) -> Draw:
    """Ask for the optimizer state alone."""
    billions = rng.choice(BILLIONS)
    p = billions * 1e9
    parts = state_bytes(p, recipe=RECIPE)
    mistakes = {
        "no-master": no_master(p) - parts.weights - parts.gradients,
        "all-states": parts.total,
        "elements": p,
    }
    return Draw({"billions": billions}, parts.optimizer, mistakes, per_parameter())


def of_zero(stage: int) -> Template:
    """Ask for the states per rank of a ZeRO stage."""

    def draw(rng: Random) -> Draw:
        billions, ranks = rng.choice(BILLIONS), rng.choice((8, 16, 32, 64))
        p = billions * 1e9
        mistakes = {
            "no-zero": state(p),
            **{f"zero-{n}": state(p, n, ranks) for n in (1, 2, 3) if n != stage},
            "no-master": no_master(p, stage, ranks),
        }
        more = per_parameter() | {"per": state(1.0, stage, ranks)}
        return Draw({"billions": billions, "ranks": ranks}, state(p, stage, ranks), mistakes, more)

    return Template(f"memory-zero-{stage}", "04", "byte", draw)


def split(rng: Random) -> Draw:
    """Ask for the states per GPU with tp, pp and dp, without ZeRO."""
    billions, tp, pp, dp = rng.choice(LARGE), rng.choice((2, 4, 8)), rng.choice((2, 4, 8)), 4
    p = billions * 1e9
    mistakes = {
        "no-pp": state(p / tp),
        "no-tp": state(p / pp),
        "dp-divides": state(p / (tp * pp * dp)),
        "no-master": no_master(p / (tp * pp)),
    }
    given = {"billions": billions, "tp": tp, "pp": pp, "dp": dp}
    more = per_parameter() | {"own": p / (tp * pp) / 1e9}
    return Draw(given, state(p / (tp * pp)), mistakes, more)


def split_zero(rng: Random) -> Draw:
    """Ask for the states per GPU with tp, pp and ZeRO-1 over dp."""
    billions, tp, pp = rng.choice(LARGE), rng.choice((4, 8)), rng.choice((2, 4, 8))
    dp = rng.choice((4, 8, 16))
    p = billions * 1e9
    own = p / (tp * pp)
    mistakes = {
        "no-pp": state(p / tp, 1, dp),
        "no-tp": state(p / pp, 1, dp),
        "no-zero": state(own),
        "dp-divides": state(own / dp),
        "no-master": no_master(own, 1, dp),
    }
    given = {"billions": billions, "tp": tp, "pp": pp, "dp": dp}
    more = per_parameter() | {"own": own / 1e9, "per": state(1.0, 1, dp)}
    return Draw(given, state(own, 1, dp), mistakes, more)


def _layer(rng: Random, tp: int = 1, rows: bool = False) -> tuple[dict[str, int], float, float]:
    """Return the sizes of a GPT layer, the bytes that it saves, and its input's."""
    hidden, batch = rng.choice((4096, 6144, 8192, 12288)), rng.choice((2, 4, 8))
    seq = rng.choice((2048, 4096, 8192))
    sizes = custom_model("gpt", layers=1, hidden=hidden, heads=hidden // 128, vocab=50304)
    plan = Configuration(tp=tp, micro_batch=batch, seq=seq, sequence_parallel=rows)
    saved = layer_activations(sizes, plan, 0)
    return {"hidden": hidden, "batch": batch, "seq": seq}, saved.total, saved.entering


def activations(rng: Random) -> Draw:
    """Ask for the activations of one layer."""
    given, total, entering = _layer(rng)
    mistakes = {"elements": total / BF16.itemsize, "input-only": entering}
    mistakes["one-sequence"] = total / given["batch"]
    x = entering / BF16.itemsize
    return Draw(given, total, mistakes, {"x": int(x), "per": total / x})


def activations_tp(rng: Random) -> Draw:
    """Ask for the activations of one layer with tensor and sequence parallelism."""
    tp, draw = rng.choice((2, 4, 8)), rng.getrandbits(32)
    given, total, entering = _layer(Random(draw), tp, True)
    mistakes = {
        "no-tp": _layer(Random(draw))[1],
        "no-sp": _layer(Random(draw), tp)[1],
        "elements": total / BF16.itemsize,
    }
    x = entering * tp / BF16.itemsize
    return Draw(given | {"tp": tp}, total, mistakes, {"x": int(x), "per": total * tp / x})


def recomputed(rng: Random) -> Draw:
    """Ask for what full recomputation saves."""
    given, total, entering = _layer(rng)
    layers = rng.choice((32, 48, 80))
    mistakes = {
        "no-recompute": layers * total,
        "elements": layers * entering / BF16.itemsize,
        "one-layer": entering,
    }
    more = {"x": int(entering / BF16.itemsize)}
    return Draw(given | {"layers": layers}, layers * entering, mistakes, more)


def logits(rng: Random) -> Draw:
    """Ask for the fp32 log-probabilities of a micro-batch."""
    sizes = model(rng.choice(("llama-2-7b", "llama-3-8b", "llama-3-70b")))
    batch, seq = rng.choice((2, 4, 8)), rng.choice((2048, 4096, 8192))
    value = recompute.saved_outside_blocks(sizes, batch, seq).log_probabilities
    plan = Configuration(micro_batch=batch, seq=seq)
    norms = head_activations(sizes, plan) - value
    mistakes = {
        "bf16": value * BF16.itemsize / DTYPES["fp32"].itemsize,
        "elements": value / DTYPES["fp32"].itemsize,
        "hidden-for-vocab": norms,
    }
    given = {"vocab": sizes.vocab, "batch": batch, "seq": seq}
    return Draw(given, value, mistakes)


def pairs_in_flight(rng: Random) -> Draw:
    """Ask for the micro-batches in flight on a rank of 1F1B."""
    stages, microbatches = rng.choice((4, 6, 8, 16)), rng.choice((16, 32, 64))
    rank = rng.randrange(stages // 2)
    mistakes = {
        "gpipe": in_flight("gpipe", stages, microbatches, rank).total,
        "last-rank": in_flight("1f1b", stages, microbatches, stages - 1).total,
        "one-less": in_flight("1f1b", stages, microbatches, rank + 1).total,
        "no-rank": in_flight("1f1b", stages, microbatches, 0).total,
    }
    value = in_flight("1f1b", stages, microbatches, rank).total
    return Draw({"stages": stages, "microbatches": microbatches, "rank": rank}, value, mistakes)


def smallest(fits: object, start: int = 1) -> int:
    """Return the smallest power of two from ``start`` for which ``fits`` holds."""
    assert callable(fits)
    return next(2**n for n in count() if 2**n >= start and fits(2**n))


def fewest_ranks(rng: Random) -> Draw:
    """Ask for the fewest ranks of ZeRO-3 whose states fit."""
    billions, gpu = rng.choice(LARGE), hardware(rng.choice(GPUS))
    p, room = billions * 1e9, gpu.capacity_bytes
    value = smallest(lambda n: state(p, 3, n) <= room)
    mistakes = {
        "no-master": smallest(lambda n: no_master(p, 3, n) <= room),
        "weights-only": smallest(lambda n: state_bytes(p, recipe=RECIPE).weights / n <= room),
        "no-optimizer": smallest(
            lambda n: (state(p) - state_bytes(p, recipe=RECIPE).optimizer) / n <= room
        ),
    }
    given = {"billions": billions, "room": Amount(room, "byte")}
    more = per_parameter() | {
        "total": Amount(state(p), "byte"),
        "ratio": state(p) / room,
        "each": Amount(state(p, 3, value), "byte"),
    }
    return Draw(given, value, mistakes, more)


def fewest_stages(rng: Random) -> Draw:
    """Ask for the smallest pp that fits, beside tp and ZeRO-1."""
    billions, tp, dp = rng.choice((180, 405, 530)), 8, rng.choice((4, 8, 16))
    gpu = hardware(rng.choice(GPUS[:2]))
    p, room = billions * 1e9 / tp, gpu.capacity_bytes
    value = smallest(lambda n: state(p / n, 1, dp) <= room)
    mistakes = {
        "no-zero": smallest(lambda n: state(p / n) <= room),
        "no-tp": smallest(lambda n: state(p * tp / n, 1, dp) <= room),
        "no-master": smallest(lambda n: no_master(p / n, 1, dp) <= room),
        "dp-divides": smallest(lambda n: state(p / n / dp) <= room),
    }
    given = {"billions": billions, "tp": tp, "dp": dp, "room": Amount(room, "byte")}
    more = per_parameter() | {
        "per": state(1.0, 1, dp),
        "total": Amount(state(p, 1, dp), "byte"),
        "each": Amount(state(p / value, 1, dp), "byte"),
    }
    return Draw(given, value, mistakes, more)


def largest_model(rng: Random) -> Draw:
    """Ask for the largest model whose states fit on the GPUs of a node."""
    gpu, gpus = hardware(rng.choice(GPUS)), rng.choice((2, 4, 8))
    room = gpus * gpu.capacity_bytes
    mistakes = {
        "no-master": room / no_master(1),
        "weights-only": room / state_bytes(1, recipe=RECIPE).weights,
        "one-gpu": gpu.capacity_bytes / state(1),
        "no-gradients": room / (state(1) - state_bytes(1, recipe=RECIPE).gradients),
    }
    given = {"gpus": gpus, "room": Amount(gpu.capacity_bytes, "byte")}
    more = per_parameter() | {"total": Amount(room, "byte")}
    return Draw(given, room / state(1), mistakes, more)


def lowest_stage(rng: Random) -> Draw:
    """Ask for the lowest stage of ZeRO that fits."""
    ranks = rng.choice((8, 16, 32, 64))
    gpu, value = hardware(rng.choice(GPUS)), rng.choice((1, 2, 3))
    room = gpu.capacity_bytes
    fitting = [
        each
        for each in (2, 3, 5, 7, 8, 13, 20, 30, 34, 40, 70)
        if _stage(state, each * 1e9, ranks, room) == value
    ]
    billions = rng.choice(fitting)
    p = billions * 1e9
    mistakes = {
        "no-master": _stage(no_master, p, ranks, room),
        "stage-too-low": value - 1,
        "stage-too-high": value + 1,
    }
    more = {f"zero{n}": Amount(state(p, n, ranks), "byte") for n in (0, 1, 2, 3)} | per_parameter()
    given = {"billions": billions, "ranks": ranks, "room": Amount(room, "byte")}
    return Draw(given, value, {k: v for k, v in mistakes.items() if v in (1, 2, 3)}, more)


def _stage(need: object, p: float, ranks: int, room: float) -> int:
    """Return the lowest stage with which ``need`` fits, 4 if none."""
    assert callable(need)
    return next((n for n in (0, 1, 2, 3) if need(p, n, ranks) <= room), 4)


def which(rng: Random) -> Draw:
    """Ask which of three layouts of the same GPUs fits."""
    room, gpus = hardware("a100-80").capacity_bytes, rng.choice((64, 128))
    billions = rng.choice((30, 70, 180))
    p = billions * 1e9
    plans = [
        (tp, pp, gpus // (tp * pp), zero)
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4, 8)
        for zero in (0, 1)
    ]

    def need(plan: tuple[int, int, int, int]) -> float:
        tp, pp, dp, zero = plan
        return state(p / (tp * pp), zero, dp)

    good = rng.choice([plan for plan in plans if need(plan) <= room])
    bad = rng.sample([plan for plan in plans if 1.05 * room < need(plan) < 8 * room], 2)
    options = [good, *bad]
    rng.shuffle(options)
    value = options.index(good) + 1
    given: dict[str, object] = {"billions": billions, "gpus": gpus, "room": Amount(room, "byte")}
    more: dict[str, object] = dict(per_parameter())
    for number, plan in enumerate(options, 1):
        for name, size in zip(("tp", "pp", "dp", "zero"), plan, strict=True):
            given[f"{name}{number}"] = size
        more[f"need{number}"] = Amount(need(plan), "byte")
    wrong = {n for n in (1, 2, 3) if n != value}
    largest = max(wrong, key=lambda n: need(options[n - 1]))
    mistakes = {"largest-layout": largest, "layout-too-large": min(wrong - {largest})}
    return Draw(given, value, mistakes, more)


TEMPLATES = (
    Template("memory-states", "04", "byte", states),
    Template("memory-optimizer", "04", "byte", optimizer),
    of_zero(1),
    of_zero(2),
    of_zero(3),
    Template("memory-split", "12", "byte", split),
    Template("memory-split-zero", "12", "byte", split_zero),
    Template("memory-activations", "06", "byte", activations),
    Template("memory-activations-tp", "06", "byte", activations_tp),
    Template("memory-recomputed", "06", "byte", recomputed),
    Template("memory-logits", "06b", "byte", logits),
    Template("memory-in-flight", "07", "count", pairs_in_flight, 0),
)
FITS = (
    Template("fits-ranks", "04", "count", fewest_ranks, 0),
    Template("fits-stages", "14", "count", fewest_stages, 0),
    Template("fits-model", "14", "count", largest_model),
    Template("fits-zero", "04", "count", lowest_stage, 0),
    Template("fits-which", "14", "count", which, 0),
)
