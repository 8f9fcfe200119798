"""Questions on the KV cache and on decoding."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from course_lib.formulas.inference import cache_bytes
from course_lib.interview.questions import Amount, Draw, Template
from course_lib.planner.catalog import Model, model
from course_lib.planner.configuration import Configuration
from course_lib.planner.hardware import hardware
from course_lib.planner.parameters import parameters
from course_lib.planner.serve import serve

MODELS = ("llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3-70b", "llama-3-405b")
GROUPED = ("llama-2-70b", "llama-3-8b", "llama-3-70b", "llama-3-405b")


def _sizes(sizes: Model) -> dict[str, int]:
    names = ("layers", "heads", "kv_heads", "head_dim")
    return {name: getattr(sizes, name) for name in names}


def _all_heads(sizes: Model) -> Model:
    return replace(sizes, kv_heads=sizes.heads)


def per_token(rng: Random) -> Draw:
    """Ask for the cache of one token."""
    sizes = model(rng.choice(MODELS))
    value = cache_bytes(sizes, 1, 1)
    mistakes = {
        "one-of-kv": value / 2,
        "all-heads": cache_bytes(_all_heads(sizes), 1, 1),
        "elements": value / sizes.dtype.itemsize,
        "one-layer": cache_bytes(sizes, 1, 1, layers=1),
    }
    return Draw(_sizes(sizes), value, mistakes, {"b": sizes.dtype.itemsize})


def of_batch(rng: Random) -> Draw:
    """Ask for the cache of a batch."""
    sizes, requests = model(rng.choice(MODELS)), rng.choice((8, 16, 32, 64))
    length = rng.choice((2048, 4096, 8192, 32768))
    value = cache_bytes(sizes, requests, length)
    mistakes = {
        "one-of-kv": value / 2,
        "all-heads": cache_bytes(_all_heads(sizes), requests, length),
        "one-request": cache_bytes(sizes, 1, length),
        "one-layer": cache_bytes(sizes, requests, length, layers=1),
    }
    more = {"token": Amount(cache_bytes(sizes, 1, 1), "byte"), "b": sizes.dtype.itemsize}
    return Draw(_sizes(sizes) | {"requests": requests, "length": length}, value, mistakes, more)


def with_tp(rng: Random) -> Draw:
    """Ask for the cache per rank where tp is larger than the number of key and value heads."""
    sizes, tp = model(rng.choice(GROUPED)), rng.choice((4, 8, 16, 32))
    requests, length = rng.choice((8, 16, 32)), rng.choice((4096, 8192))
    value = cache_bytes(sizes, requests, length, tp=tp)
    whole = cache_bytes(sizes, requests, length)
    mistakes = {
        "no-tp": whole,
        "divided-copies": whole / tp,
        "one-of-kv": value / 2,
        "all-heads": cache_bytes(_all_heads(sizes), requests, length, tp=tp),
    }
    given = _sizes(sizes) | {"tp": tp, "requests": requests, "length": length}
    more = {"own": max(sizes.kv_heads // tp, 1), "b": sizes.dtype.itemsize}
    return Draw(given, value, mistakes, more)


def with_pp(rng: Random) -> Draw:
    """Ask for the cache per GPU with tp and pp."""
    sizes = model(rng.choice(("llama-2-70b", "llama-3-70b")))
    tp, pp = rng.choice((2, 4, 8)), rng.choice((2, 4))
    requests, length = rng.choice((8, 16, 32)), rng.choice((4096, 8192))

    def cache(t: int, p: int, like: Model = sizes) -> int:
        return cache_bytes(like, requests, length, layers=like.layers // p, tp=t)

    mistakes = {
        "no-pp": cache(tp, 1),
        "no-tp": cache(1, pp),
        "one-of-kv": cache(tp, pp) / 2,
        "all-heads": cache(tp, pp, _all_heads(sizes)),
    }
    given = _sizes(sizes) | {"tp": tp, "pp": pp, "requests": requests, "length": length}
    more = {"own": sizes.kv_heads // tp, "own_layers": sizes.layers // pp}
    return Draw(given, cache(tp, pp), mistakes, more | {"b": sizes.dtype.itemsize})


def requests_that_fit(rng: Random) -> Draw:
    """Ask for the requests whose cache fits beside the weights."""
    name, tp = rng.choice((("llama-3-8b", 1), ("llama-2-13b", 1), ("llama-3-70b", 8)))
    sizes, gpu = model(name), hardware(rng.choice(("a100-80", "h200")))
    length = rng.choice((2048, 4096, 8192))

    def fit(like: Model) -> int:
        plan = Configuration(tp=tp, sequence_parallel=tp > 1)
        made = serve(like, gpu, plan, prompt=length - 1, generate=1, reserve=0.0)
        return made.requests_in_flight

    value = fit(sizes)
    each = cache_bytes(sizes, 1, length, tp=tp)
    weights = serve(sizes, gpu, Configuration(tp=tp)).weights_bytes
    mistakes = {
        "no-weights": int(gpu.capacity_bytes // each),
        "one-of-kv": int((gpu.capacity_bytes - weights) // (each / 2)),
        "all-heads": int(
            (gpu.capacity_bytes - weights) // cache_bytes(_all_heads(sizes), 1, length, tp=tp)
        ),
    }
    given: dict[str, object] = {
        "weights": Amount(weights, "byte"),
        "room": Amount(gpu.capacity_bytes, "byte"),
        "token": Amount(cache_bytes(sizes, 1, 1, tp=tp), "byte"),
        "length": length,
    }
    more = {
        "each": Amount(each, "byte"),
        "left": Amount(gpu.capacity_bytes - weights, "byte"),
    }
    return Draw(given, value, mistakes, more)


def decode(rng: Random) -> Draw:
    """Ask for the least time per token of one request."""
    sizes = model(rng.choice(("llama-2-7b", "llama-2-13b", "llama-3-8b")))
    gpu = hardware(rng.choice(("a100-80", "h100", "h200")))
    read = parameters(sizes) * sizes.dtype.itemsize
    value = read / gpu.memory_bandwidth
    mistakes = {
        "elements": parameters(sizes) / gpu.memory_bandwidth,
        "compute-bound": 2 * parameters(sizes) / gpu.peak["bf16"],
    }
    given = {
        "billions": parameters(sizes) / 1e9,
        "bandwidth": Amount(gpu.memory_bandwidth, "byte/s"),
    }
    return Draw(given, value, mistakes, {"read": Amount(read, "byte"), "b": sizes.dtype.itemsize})


TEMPLATES = (
    Template("kv-token", "13", "byte", per_token),
    Template("kv-batch", "13", "byte", of_batch),
    Template("kv-tp", "13", "byte", with_tp),
    Template("kv-pp", "13b", "byte", with_pp),
    Template("kv-requests", "13", "count", requests_that_fit),
    Template("kv-decode", "13", "s", decode),
)
