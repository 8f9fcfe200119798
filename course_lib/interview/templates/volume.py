"""Questions on the bytes that a rank sends."""

from __future__ import annotations

from fractions import Fraction
from random import Random

from course_lib.formulas import cp, dp, ep, pp, zero
from course_lib.formulas.moves import entering, leaving, wire_of
from course_lib.interview.questions import Amount, Draw, Template
from course_lib.ledger import wire
from course_lib.planner.catalog import BF16, DTYPES, Model, custom_model
from course_lib.schedule import make

RANKS = (4, 8, 16, 32)
FP32 = DTYPES["fp32"]


def collective(op: str) -> Template:
    """Ask for the bytes that a rank sends in one ring collective."""

    def draw(rng: Random) -> Draw:
        n, megabytes = rng.choice(RANKS), rng.choice((64, 128, 200, 256, 400, 512))
        payload = megabytes * 10**6
        gathered = wire("all_gather", Fraction(payload, n), n)  # payload: the shard of a rank
        both = wire("all_reduce", payload, n)
        value, other = (both, gathered) if op == "all_reduce" else (gathered, both)
        mistakes = {
            "one-pass" if op == "all_reduce" else "two-passes": other,
            "all-ranks": n * value,
            "no-own-share": value * Fraction(n, n - 1),
            "one-step": Fraction(payload, n),
        }
        more = {"less": n - 1, "chunk": Amount(payload / n, "byte")}
        return Draw({"ranks": n, "payload": Amount(payload, "byte")}, value, mistakes, more)

    return Template(f"volume-{op.replace('_', '-')}", "02", "byte", draw)


def data_parallel(rng: Random) -> Draw:
    """Ask for the gradient all-reduce of a step."""
    billions, n = rng.choice((1, 3, 7, 13)), rng.choice(RANKS)
    p = billions * 10**9
    mistakes = {
        "one-pass": wire("reduce_scatter", p * BF16.itemsize, n),
        "fp32": dp.wire_bytes(p * FP32.itemsize, n),
        "elements": dp.wire_bytes(p, n),
        "all-ranks": n * dp.wire_bytes(p * BF16.itemsize, n),
    }
    more = {"less": n - 1, "size": Amount(p * BF16.itemsize, "byte")}
    given = {"billions": billions, "ranks": n}
    return Draw(given, dp.wire_bytes(p * BF16.itemsize, n), mistakes, more)


def zero_3(rng: Random) -> Draw:
    """Ask for what ZeRO-3 sends per step of several micro-batches."""
    billions, n, m = rng.choice((7, 13, 30)), rng.choice((8, 16, 32)), rng.choice((2, 4, 8))
    p = billions * 10**9

    def sent(stage: int, rounds: int, elements: int = p) -> Fraction:
        return zero.wire_bytes(stage, [elements], n, dtype=BF16, micro_batches=rounds)

    once = zero.wire_bytes(3, [p], n, dtype=BF16, micro_batches=m, gathered_once=(0,))
    mistakes = {
        "zero-1": sent(1, m),
        "zero-2": sent(2, m),
        "one-gather": once,
        "one-micro-batch": sent(3, 1),
    }
    given = {"billions": billions, "ranks": n, "microbatches": m}
    more = {"less": n - 1, "b": BF16.itemsize, "a": FP32.itemsize}
    return Draw(given, sent(3, m), mistakes, more)


def _x(rng: Random) -> tuple[dict[str, int], int]:
    """Return the sizes of activations, and their bytes in bf16."""
    batch, seq = rng.choice((2, 4, 8)), rng.choice((2048, 4096, 8192))
    hidden = rng.choice((4096, 5120, 8192))
    size = batch * seq * hidden * BF16.itemsize
    return {"batch": batch, "seq": seq, "hidden": hidden}, size


def tensor_parallel(rng: Random) -> Draw:
    """Ask for what a rank of tp sends in one layer."""
    given, size = _x(rng)
    n = rng.choice((2, 4, 8))
    enter, leave = entering(size, n), leaving(size, n)
    value = 2 * (enter.wire() + leave.wire())
    mistakes = {
        "forward-only": 2 * leave.wire(),
        "one-pass": 4 * wire("reduce_scatter", size, n),
        "elements": value / BF16.itemsize,
        "no-own-share": value * Fraction(n, n - 1),
    }
    more = {"less": n - 1, "size": Amount(size, "byte")}
    return Draw(given | {"ranks": n}, value, mistakes, more)


def sequence_parallel(rng: Random) -> Draw:
    """Ask for what sequence parallelism sends in the forward of a layer."""
    given, size = _x(rng)
    n = rng.choice((2, 4, 8))
    enter, leave = entering(size, n, rows=True), leaving(size, n, rows=True)
    value = 2 * wire_of((*enter.forward, *leave.forward))
    mistakes = {
        "two-passes": 2 * value,
        "one-region": value / 2,
        "no-own-share": value * Fraction(n, n - 1),
        "elements": value / BF16.itemsize,
    }
    more = {"less": n - 1, "size": Amount(size, "byte")}
    return Draw(given | {"ranks": n}, value, mistakes, more)


def pipeline(rng: Random) -> Draw:
    """Ask for what a pipeline sends in a step, all ranks together."""
    given, size = _x(rng)
    stages, m = rng.choice((4, 8)), rng.choice((8, 16, 32))
    schedule = make("1f1b", stages, m)
    value = pp.wire_bytes(schedule, m * size)
    mistakes = {
        "forward-only": value // 2,
        "ends-count": value * stages // (stages - 1),
        "one-micro-batch": pp.wire_bytes(schedule, size),
        "elements": value / BF16.itemsize,
    }
    more = {"borders": pp.stage_boundaries(schedule), "size": Amount(size, "byte")}
    return Draw(given | {"stages": stages, "microbatches": m}, value, mistakes, more)


def _attention(rng: Random) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of one layer's attention and of a sequence on cp ranks."""
    heads = rng.choice((32, 64))
    kv_heads, n = 8, rng.choice((4, 8, 16))
    sizes = {"heads": heads, "kv_heads": kv_heads, "hidden": 128 * heads}
    return sizes, {"ranks": n, "seq": rng.choice((32768, 65536, 131072))}


def _config(sizes: dict[str, int], kv_heads: int | None = None) -> Model:
    kv = sizes["kv_heads"] if kv_heads is None else kv_heads
    return custom_model(
        "llama",
        layers=1,
        vocab=32000,
        hidden=sizes["hidden"],
        heads=sizes["heads"],
        kv_heads=kv,
    )


def ring(rng: Random) -> Draw:
    """Ask for the K and V that a rank of ring attention sends forward."""
    sizes, given = _attention(rng)
    n, seq = given["ranks"], given["seq"]

    def sent(kv_heads: int | None = None) -> Fraction:
        config = _config(sizes, kv_heads)
        both = cp.gather_wire_bytes(config, 1, seq, n, forwards=2)
        once = cp.gather_wire_bytes(config, 1, seq, n, forwards=1)
        return both - once

    value = sent()
    mistakes = {
        "all-heads": sent(sizes["heads"]),
        "one-of-kv": value / 2,
        "elements": value / BF16.itemsize,
        "no-own-share": value * Fraction(n, n - 1),
    }
    own = 2 * seq // n * sizes["kv_heads"] * 128 * BF16.itemsize
    more = {"less": n - 1, "own": Amount(own, "byte"), "rows": seq // n}
    named = {"heads": sizes["heads"], "kv_heads": sizes["kv_heads"], "head_dim": 128}
    return Draw(given | named, value, mistakes, more)


def experts(rng: Random) -> Draw:
    """Ask for what a rank sends for the experts of a layer."""
    n, tokens = rng.choice((4, 8, 16)), rng.choice((4096, 8192, 16384))
    hidden, top_k = rng.choice((4096, 7168)), rng.choice((2, 4, 8))
    row = hidden * BF16.itemsize
    value = ep.even_wire_bytes(tokens, top_k, row, n)
    mistakes = {
        "one-expert": ep.even_wire_bytes(tokens, 1, row, n),
        "forward-only": value / 2,
        "dispatch-only": value / 4,
        "no-own-share": value * Fraction(n, n - 1),
    }
    given = {"ranks": n, "tokens": tokens, "hidden": hidden, "top_k": top_k}
    return Draw(given, value, mistakes, {"less": n - 1, "row": Amount(row, "byte")})


def seconds(rng: Random) -> Draw:
    """Ask for the time of an all-reduce at a bandwidth in gigabits."""
    n, gigabytes = rng.choice(RANKS), rng.choice((2, 4, 10, 14))
    gigabits = rng.choice((100, 200, 400))
    payload, rate = gigabytes * 10**9, gigabits * 1e9 / 8
    value = wire("all_reduce", payload, n) / rate
    mistakes = {
        "bits-for-bytes": float(value) / 8,
        "one-pass": wire("reduce_scatter", payload, n) / rate,
        "payload-once": payload / rate,
        "all-ranks": n * value,
    }
    given = {"ranks": n, "payload": Amount(payload, "byte"), "gigabits": gigabits}
    more = {
        "less": n - 1,
        "rate": Amount(rate, "byte/s"),
        "sent": Amount(float(wire("all_reduce", payload, n)), "byte"),
    }
    return Draw(given, value, mistakes, more)


TEMPLATES = (
    collective("all_reduce"),
    collective("all_gather"),
    Template("volume-dp", "03", "byte", data_parallel),
    Template("volume-zero-3", "04", "byte", zero_3),
    Template("volume-tp", "05", "byte", tensor_parallel),
    Template("volume-sp", "06", "byte", sequence_parallel),
    Template("volume-pp", "07", "byte", pipeline),
    Template("volume-ring", "09", "byte", ring),
    Template("volume-ep", "10", "byte", experts),
    Template("volume-seconds", "02", "s", seconds),
)
