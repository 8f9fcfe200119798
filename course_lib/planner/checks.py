"""Which configurations are impossible, in sentences: what was expected, given, and what to do."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

from course_lib.planner.catalog import Model
from course_lib.schedule.named import CHUNKS

if TYPE_CHECKING:
    from course_lib.planner.configuration import Configuration

# Above these a number is a mistake, and a plan would take minutes.
LARGEST = {
    "gpus": 2**20,
    "micro_batch": 2**20,
    "global_batch": 2**30,
    "seq": 2**28,
    "chunks": 2**10,
}
ANY_CHUNKS = ("naive", "gpipe", "interleaved")


def check_number(name: str, value: object, most: int, least: int = 1) -> None:
    """Raise ValueError unless ``value`` is a whole number from ``least`` to ``most``."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"expected a whole number from {least} to {most:,}, got {name}={value!r}")


def check_degrees(gpus: int, tp: int, pp: int, cp: int, dp: int | None, ep: int) -> None:
    """Raise ValueError unless these are numbers and the degrees multiply to ``gpus``."""
    check_number("gpus", gpus, LARGEST["gpus"])
    others = {"tp": tp, "pp": pp, "cp": cp} | ({} if dp is None else {"dp": dp})
    for name, value in {**others, "ep": ep}.items():
        check_number(name, value, LARGEST["gpus"])
    product = tp * pp * cp * (1 if dp is None else dp)
    names, numbers = " x ".join(others), " x ".join(map(str, others.values()))
    if dp is None and gpus % product:
        raise ValueError(
            f"expected {names} to divide {gpus} GPUs, got {numbers} = {product}; "
            "change a degree or the number of GPUs"
        )
    if dp is not None and gpus != product:
        raise ValueError(
            f"expected {names} = {gpus} GPUs, got {numbers} = {product}; change a degree, or leave "
            "dp out: it is then what is left"
        )


def check(model: Model, configuration: Configuration) -> None:
    """Raise ValueError if this model cannot be trained so."""
    _check_tp(model, configuration)
    _check_pp(model, configuration)
    _check_cp(configuration)
    _check_ep(model, configuration)
    _check_batch(configuration)
    if configuration.zero not in (0, 1, 2, 3):
        raise ValueError(
            f"expected zero=0 (none), 1, 2 or 3, got zero={configuration.zero!r}; choose one"
        )
    if configuration.recipe not in (16, 18, 20):
        raise ValueError(
            f"expected recipe=16, 18 or 20 bytes per parameter, got recipe={configuration.recipe!r}"
        )


def _check_tp(model: Model, configuration: Configuration) -> None:
    t = configuration.tp
    divided = {"heads": model.heads}
    if model.experts is None or model.experts.dense_layers:
        divided["inner features of the MLP"] = model.ffn
    if model.experts is not None and model.experts.shared:
        divided["inner features of a shared expert"] = model.experts.ffn
    for name, size in divided.items():
        if size % t:
            raise ValueError(
                f"expected tp to divide {size} {name}, got tp={t}; choose {_divisors(size)}"
            )
    kv = model.kv_heads
    if model.latent is None and max(kv, t) % min(kv, t):
        raise ValueError(
            f"expected tp={t} to divide {kv} key and value heads or to be a multiple of them, so "
            "that each rank has whole heads or shares one; choose another tp"
        )


def _check_pp(model: Model, configuration: Configuration) -> None:
    p, v, name = configuration.pp, configuration.chunks, configuration.schedule
    check_number("chunks", v, LARGEST["chunks"])
    wanted = CHUNKS.get(name, 1)
    if name not in ANY_CHUNKS and v != wanted:
        other = "; with more chunks choose schedule=interleaved" if wanted == 1 else ""
        raise ValueError(
            f"expected chunks={wanted} with schedule={name}, got chunks={v}{other}; or leave "
            "chunks out"
        )
    if p * v > model.layers:
        raise ValueError(
            f"expected pp x chunks of at most {model.layers} layers, got {p} x {v} = {p * v}: a "
            "stage has one layer at least; choose fewer stages"
        )
    given = configuration.stage_layers
    if given is None:
        return
    if len(given) != p * v or sum(given) != model.layers or min(given) < 1:
        raise ValueError(
            f"expected stage_layers of pp x chunks = {p * v} stages with one layer at least and "
            f"{model.layers} in all, got {len(given)} stages with {sum(given)} layers: "
            f"{', '.join(map(str, given))}"
        )


def _check_cp(configuration: Configuration) -> None:
    t, c, seq = configuration.tp, configuration.cp, configuration.seq
    pieces = 2 * c if c > 1 else 1  # zig-zag: an early and a late chunk per rank
    multiple = lcm(pieces, c * t) if configuration.sequence_parallel else pieces
    if seq % multiple:
        rows = f", and tp={t} equal rows of those of each rank" if multiple > pieces else ""
        raise ValueError(
            f"expected seq to be a multiple of {multiple}, got seq={seq}: cp={c} needs {pieces} "
            f"equal chunks{rows}; choose seq={-(-seq // multiple) * multiple}"
        )


def _check_ep(model: Model, configuration: Configuration) -> None:
    e, data = configuration.ep, configuration.dp * configuration.cp
    if e > 1 and model.experts is None:
        raise ValueError(
            f"expected ep=1 for {model.name}, which has no experts, got ep={e}; leave ep out"
        )
    if data % e:
        raise ValueError(
            f"expected ep to divide dp x cp = {data}, got ep={e}: its ranks have different tokens; "
            f"choose {_divisors(data)}"
        )
    if model.experts is not None and model.experts.number % e:
        number = model.experts.number
        raise ValueError(
            f"expected ep to divide {number} experts, got ep={e}; choose {_divisors(number)}"
        )


def _check_batch(configuration: Configuration) -> None:
    rows = configuration.dp * configuration.micro_batch
    if configuration.global_batch % rows:
        more = -(-configuration.global_batch // rows) * rows
        raise ValueError(
            f"expected dp x micro_batch = {configuration.dp} x {configuration.micro_batch} = "
            f"{rows} to divide global_batch, got global_batch={configuration.global_batch}; choose "
            f"global_batch={more}, or another dp or micro_batch"
        )


def _divisors(number: int, most: int = 12) -> str:
    """Return the divisors of ``number`` in words; the smallest if there are many."""
    found = [str(n) for n in range(1, min(number, 2**16) + 1) if number % n == 0]
    if len(found) > most:
        return ", ".join(found[:most]) + " or a larger divisor"
    return found[0] if len(found) == 1 else ", ".join(found[:-1]) + " or " + found[-1]
