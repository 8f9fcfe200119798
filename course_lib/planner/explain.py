"""The derivation of an estimate with its numbers filled in, as on a whiteboard.

Each line is formula = numbers = result. Where the planner counts more than the formula (norms,
biases, the vocabulary's part of the traffic), the line ends with the planner's value.
"""

from __future__ import annotations

from collections.abc import Iterator

from course_lib.planner.communication import Shape
from course_lib.planner.configuration import RECIPES
from course_lib.planner.flops import blocks_flops, head_flops, step_flops
from course_lib.planner.in_flight import in_flight
from course_lib.planner.memory import (
    WIDE,
    activation_bytes,
    layer_activations,
    stage_states,
)
from course_lib.planner.parameters import (
    is_expert_layer,
    layer_parameters,
    layers_of_rank,
    parameters_per_rank,
)
from course_lib.planner.result import Estimate
from course_lib.planner.text import count, duration, layout, number, percent, wrapped

SIGNS = {"1f1b": "(p-1) / m", "gpipe": "(p-1) / m", "interleaved": "(p-1) / (m v)"}


def derivation(estimate: Estimate, generation: str | None = None) -> list[str]:
    """Return the lines of the whiteboard, at most 80 characters each.

    ``generation`` of the software is that of the estimate.
    """
    board = _Board(estimate, generation)
    lines = [*board.heading()]
    for title, part in (
        ("Parameters", board.parameters()),
        ("Memory of a GPU", board.memory()),
        ("Communication of a GPU in a step", board.communication()),
        ("Time", board.time()),
    ):
        lines += [title]
        for name, text in part:
            lines += wrapped(text, f"  {name:<12}")
    return lines


class _Board:
    """The symbols of an estimate, and the lines that use them."""

    def __init__(self, estimate: Estimate, generation: str | None) -> None:
        self.estimate, self.generation = estimate, generation
        self.model, self.plan = estimate.model, estimate.configuration
        self.stage = max(range(self.plan.pp), key=self._bytes)
        self.layers = layers_of_rank(self.model, self.plan, self.stage)

    @property
    def width(self) -> int:
        """Bytes of an activation."""
        return max(self.plan.dtype.itemsize, 2)

    def _bytes(self, stage: int) -> float:
        states = stage_states(self.model, self.plan, stage)
        return states.total + activation_bytes(self.model, self.plan, stage)

    def heading(self) -> Iterator[str]:
        model, plan = self.model, self.plan
        yield from wrapped(
            f"{model.name} on {plan.world:,} x {self.estimate.hardware.name}: {layout(plan)}"
        )
        experts = model.experts
        sizes = f"layers L={model.layers}, hidden h={model.hidden}, heads H={model.heads}, "
        sizes += f"KV heads G={model.kv_heads}, features per head K={model.head_dim}, "
        sizes += f"inner features f={model.ffn}, vocabulary V={model.vocab}"
        if experts:
            sizes += f", experts E={experts.number}, top_k k={experts.top_k}, "
            sizes += f"inner features of an expert fe={experts.ffn}"
        yield from wrapped(sizes, "model  ")
        yield from wrapped(
            f"tp t={plan.tp}, cp c={plan.cp}, pp p={plan.pp}, chunks v={plan.chunks}, dp "
            f"d={plan.dp}, ep e={plan.ep}, GPUs N={plan.world}; tokens per sequence s={plan.seq}; "
            f"sequences per micro-batch b={plan.micro_batch}, per step B={plan.global_batch}; "
            f"micro-batches per replica m={plan.micro_batches}",
            "plan   ",
        )

    def parameters(self) -> Iterator[tuple[str, str]]:
        model = self.model
        last = model.layers - 1
        one = layer_parameters(model, last)
        matrices = 3 if model.family == "llama" else 2
        h, heads, kv, k = model.hidden, model.heads, model.kv_heads, model.head_dim
        attention = one.attention
        if model.latent:
            yield "attention", f"low-rank projections of MLA = {count(attention)}"
        else:
            attention = 2 * h * k * (heads + kv)
            yield "attention", f"2 h K (H + G) = 2 x {h} x {k} x {heads + kv} = {count(attention)}"
        mlp = matrices * h * model.ffn
        dense = model.experts.dense_layers if model.experts else model.layers
        if dense:
            yield "MLP", f"{matrices} h f = {matrices} x {h} x {model.ffn} = {count(mlp)}"
        if model.experts:
            experts = model.experts
            each = matrices * h * experts.ffn
            total = each * (experts.number + experts.shared)
            yield (
                "experts",
                f"(E + shared) {matrices} h fe = {experts.number + experts.shared} x {matrices} x "
                f"{h} x {experts.ffn} = {count(total)}",
            )
            routed = model.layers - dense
            whole = one.dense + one.experts
            yield "MoE layer", f"attention + experts + router, norms = {count(whole)}"
        if dense:
            first = layer_parameters(model, 0)
            rest = first.dense - attention - mlp
            yield (
                "layer",
                f"attention + MLP + norms, biases = {count(attention)} + {count(mlp)} + "
                f"{rest / 1e6:.3g} M = {count(first.dense)}",
            )
        tables = 1 if model.tied else 2
        table = model.vocab * h
        name = "V h" if model.tied else "2 V h"
        yield "vocabulary", f"{name} = {tables} x {model.vocab} x {h} = {count(tables * table)}"
        parts = [f"{dense} x layer"] if dense else []
        parts += [f"{routed} x MoE layer"] if model.experts else []
        yield (
            "P",
            f"{' + '.join(parts)} + vocabulary + norm = "
            f"{count(self.estimate.parameters)}"
            + (f"; {count(self.estimate.active_parameters)} active" if model.experts else ""),
        )

    def memory(self) -> Iterator[tuple[str, str]]:
        plan, model, found = self.plan, self.model, self.estimate.memory
        held = parameters_per_rank(model, plan, self.stage)
        data = plan.dp * plan.cp
        text = f"stage {self.stage}: {len(self.layers)} layers and vocabulary by t = {plan.tp}: "
        text += count(held.dense)
        if held.experts:
            text += f"; experts by e = {plan.ep}: {count(held.experts)}"
        yield "shard", text
        recipe = WIDE.get(plan.dtype.name, RECIPES[plan.recipe])
        parts = ("weights", "gradients", "optimizer")
        for name, width, zero in zip(parts, recipe, (3, 2, 1), strict=True):
            size = getattr(found, name)
            shards = data if plan.zero >= zero else 1
            formula, numbers = f"{width} B x shard", f"{width} x {count(held.dense)}"
            if shards > 1:
                formula, numbers = f"{formula} / (d c)", f"{numbers} / {shards}"
            if held.experts:
                of_experts = data // plan.ep if shards > 1 else 1
                numbers += f" + {width} x {count(held.experts)}"
                numbers += f" / {of_experts}" if of_experts > 1 else ""
            if zero == 3 and shards > 1:
                numbers += " + two gathered layers"
            yield name, f"{formula} = {numbers} = {_gb(size)}"
        yield from self._activations()
        capacity = self.estimate.hardware.capacity_bytes
        sizes = " + ".join(number(getattr(found, part) / 1e9) for part in (*parts, "activations"))
        free = found.total + self.estimate.headroom_bytes
        fits = "fits" if self.estimate.fits else "too much"
        yield (
            "total",
            f"{sizes} = {_gb(found.total)} of {_gb(capacity)}, of which {_gb(free)} are free after "
            f"the reserve: {fits}",
        )

    def _activations(self) -> Iterator[tuple[str, str]]:
        plan, model = self.plan, self.model
        one = layer_activations(model, plan, self.layers[-1])
        saved = one.saved(plan.recompute)
        tokens = plan.seq * plan.micro_batch // plan.cp
        w = self.width
        plain = model.latent is None and not is_expert_layer(model, self.layers[-1])
        each = f"{tokens} tokens x the rows of layer_activations in planner/memory.py"
        if plan.recompute == "full":
            each = f"{w} h s b / (c t) = {w} x {model.hidden} x {tokens} / {plan.tp}"
        elif (
            plain
            and plan.fused_attention
            and not model.dropout
            and plan.sequence_parallel | (plan.tp == 1)
        ):
            norms, copies = 2 * model.block_norms, 3 if model.family == "llama" else 2
            outside, inside = norms * w, 2 * w * model.head_dim
            each = (
                f"({outside} h + {2 * w} K (H + G) + {copies * w} f) s b / (c t) = "
                f"({outside} x {model.hidden} + {inside} x {model.heads + model.kv_heads} + "
                f"{copies * w} x {model.ffn}) x {tokens} / {plan.tp}"
            )
        yield "per layer", f"{each} = {number(saved / 1e6)} MB"
        flying = in_flight(plan.schedule, plan.pp, plan.micro_batches, self.stage, plan.chunks)
        chunks = len(flying.whole)
        layers = len(self.layers)
        main = sum(flying.whole) / chunks * layers * saved
        units = (
            f"{sum(flying.whole)} in flight"
            if chunks == 1
            else f"{sum(flying.whole)} in flight over {chunks} chunks"
        )
        yield (
            "activations",
            f"{units} x {layers / chunks:.4g} layers x {number(saved / 1e6)} MB = {_gb(main)}; "
            f"all {_gb(self.estimate.memory.activations)}",
        )

    def communication(self) -> Iterator[tuple[str, str]]:
        hardware = self.estimate.hardware
        formulas = {
            "tp": self._tp,
            "pp": self._pp,
            "dp": self._data,
            "dp_cp": self._data,
        }
        if not self.estimate.communication:
            yield "none", "one GPU"
        for axis, one in self.estimate.communication.items():
            links = {"node": hardware.node, "network": hardware.network}
            names = [name for name in links if name in one.link]
            speeds = " and ".join(
                f"{links[name].bandwidth * links[name].efficiency / 1e9:.4g} GB/s" for name in names
            )
            text = formulas[axis]() if axis in formulas else ""
            yield (
                axis,
                f"{text}{_gb(one.wire_bytes)} in {one.calls:,} calls at {speeds}: "
                f"{duration(one.seconds)}, {duration(one.exposed_seconds)} exposed",
            )

    def _tp(self) -> str:
        """Gathers and reduce-scatters of attention and MLP; an all-reduce is both."""
        plan, model = self.plan, self.model
        x = plan.seq * plan.micro_batch // plan.cp * model.hidden * self.width
        passes = 4 + (plan.sequence_parallel and plan.gather_again) + 2 * (plan.recompute == "full")
        routed = sum(is_expert_layer(model, layer) for layer in self.layers)
        regions = 2 * len(self.layers) - (routed if plan.sequence_parallel else 0)
        t = plan.tp
        size = passes * (t - 1) / t * x * regions * plan.micro_batches
        return (
            f"{passes} calls x (t-1)/t {self.width} s b h{' / c' * (plan.cp > 1)} x regions x m = "
            f"{passes} x {t - 1}/{t} x "
            f"{number(x / 1e6)} MB x {regions} x {plan.micro_batches} = {_gb(size)}; "
        )

    def _pp(self) -> str:
        """One tensor per stage boundary, direction and micro-batch."""
        plan, model = self.plan, self.model
        rows = plan.seq * plan.micro_batch // plan.cp // (plan.tp if plan.sequence_parallel else 1)
        size = rows * model.hidden * self.width
        return f"{self.width} s b h / (c t) = {number(size / 1e6)} MB per micro-batch; "

    def _data(self) -> str:
        """Gradients, and with ZeRO weights, of the rank's dense parameters."""
        plan, shape = self.plan, Shape(self.model, self.plan)
        n, m = shape.data, plan.micro_batches
        share = parameters_per_rank(self.model, plan, self.stage).dense
        g, w = shape.gradient_itemsize, shape.itemsize
        bytes_each, text = {
            0: (2 * g, f"2 x {g} B"),
            1: (g + w, f"({g} + {w}) B"),
            2: (g * m + w, f"({g} m + {w}) B"),
            3: (g * m + 2 * w * m, f"({g} m + {2 * w} m) B"),
        }[plan.zero]
        size = (n - 1) / n * bytes_each * share
        return (
            f"(n-1)/n x {text} x share, n = {n}: {n - 1}/{n} x {bytes_each} B x {count(share)} = "
            f"{_gb(size)}; "
        )

    def time(self) -> Iterator[tuple[str, str]]:
        plan, model, found = self.plan, self.model, self.estimate
        hardware = found.hardware
        blocks = blocks_flops(model, plan.seq, attention="causal")
        matrices = blocks.projections + blocks.mlp + head_flops(model)
        each = 3 * (matrices + blocks.core)
        yield (
            "per token",
            f"6 x matrices + 6 L s H K = 6 x {count(matrices / 2)} + {count(3 * blocks.core)} = "
            f"{count(each)} FLOP",
        )
        step = step_flops(model, plan)
        yield (
            "step",
            f"x B s = {count(each)} x {count(plan.tokens)} = {step:.4g} FLOP, per GPU "
            f"{step / plan.world:.4g}",
        )
        peak = hardware.peak[plan.dtype.name]
        efficiency = hardware.efficiency_of(plan.dtype.name, self.generation)
        compute = found.parts.get("compute", 0.0)
        yield (
            "compute",
            f"FLOP / (peak x efficiency) = {step / plan.world:.4g} / ({peak / 1e12:.4g} T x "
            f"{efficiency:.3g}) = {duration(step / plan.world / peak / efficiency)}; "
            f"worst stage {duration(compute)}",
        )
        if plan.pp > 1:
            rounds = plan.micro_batches * plan.chunks
            share = (plan.pp - 1) / rounds
            text = f"simulated {percent(found.bubble_of_ideal)} of ideal"
            if plan.schedule in SIGNS:
                text = (
                    f"{SIGNS[plan.schedule]} = {plan.pp - 1} / {rounds} = "
                    f"{percent(share)} of ideal; {text}"
                )
            yield "bubble", text
        parts = [f"{name} {duration(one)}" for name, one in found.parts.items() if one]
        yield "step time", f"{' + '.join(parts)} = {duration(found.step_seconds)}"
        yield (
            "tokens",
            f"B s / (time N) = {count(plan.tokens)} / ({duration(found.step_seconds)} x "
            f"{plan.world:,}) = {found.tokens_per_gpu_second:,.0f} per GPU and s",
        )
        yield (
            "MFU",
            f"FLOP / (time N peak) = {step:.4g} / ({duration(found.step_seconds)} x {plan.world:,} "
            f"x {peak / 1e12:.4g} T) = {percent(found.mfu)}; full attention "
            f"{percent(found.mfu_full_attention)}, HFU {percent(found.hfu)}",
        )


def _gb(size: float) -> str:
    return f"{number(size / 1e9)} GB"
