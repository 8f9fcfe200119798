"""`course bench ep`: compare our expert-parallel layer with two other ways to compute it.

Torch has no expert-parallel layer, only its building blocks: an all-to-all with a gradient, and a
grouped matrix product. A test compares our values with these. Here our layer is compared with:

* ``gathered``: every rank gathers all tokens and computes the partial outputs of its own experts;
  a reduce-scatter sums them. Every token is sent to every rank: n/top_k times our bytes, for n
  ranks.
* ``all experts``: no network, but every rank stores all experts. This is only the arithmetic, with
  an even load, for n times the memory.

All contestants run in the same four processes, forward and backward of one layer on the same
tokens. ``ep again`` is a second layer of ours: its ratio to the first is the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from course_lib import comm, ep
from course_lib.bench.rounds import Say, Times, interleave, quiet, ratios, slowest_rank, timed
from course_lib.launch import World
from course_lib.mesh import Mesh, make_mesh
from course_lib.model import ModelConfig, build_model

RANKS, EXPERTS, CHOICES, TOKENS = 4, 8, 2, 256  # tokens per rank
CONFIG = ModelConfig(layers=1, hidden=256, heads=8, kv_heads=8, ffn=512)
PEER = "gathered"


def measure(rounds: int = 20, say: Say = quiet) -> dict:
    """Return median ratios to gathering, ms and bytes of one layer's forward and backward."""
    with World(RANKS) as world:
        by_rank = list(world.run(_time_ranks, rounds, say, timeout=120 + 10 * rounds))
    times = slowest_rank([times for times, *_ in by_rank])
    return {
        "ranks": RANKS,
        "rounds": rounds,
        "shape": {
            "experts": EXPERTS,
            "choices": CHOICES,
            "tokens": TOKENS,
            "hidden": CONFIG.hidden,
            "ffn": CONFIG.ffn,
        },
        "milliseconds": {name: 1e3 * median(seconds) for name, seconds in times.items()},
        "ratio_to_gathered": ratios(times, PEER),
        "bytes_a_rank": {
            name: float(sum(sent[name] for _, sent, _ in by_rank)) / RANKS for name in times
        },
        "imbalance_of_ranks": by_rank[0][2],
    }


def text(result: dict) -> str:
    """Return the result as a table."""
    shape = result["shape"]
    lines = [
        f"One layer of {shape['experts']} experts, top_k={shape['choices']}, on "
        f"{result['ranks']} ranks with {shape['tokens']} tokens each, {result['rounds']} rounds",
        f"{'':<14}{'ms':>8}{'to gathered':>14}{'kB sent per rank':>18}",
    ]
    for name, milliseconds in result["milliseconds"].items():
        ratio = result["ratio_to_gathered"].get(name)
        shown = "1" if ratio is None else f"{ratio:.2f}"
        kilobytes = result["bytes_a_rank"][name] / 1e3
        lines.append(f"{name:<14}{milliseconds:>8.1f}{shown:>14}{kilobytes:>18,.0f}")
    return "\n".join(
        [
            *lines,
            f"The busiest rank computes {result['imbalance_of_ranks']:.2f} times the mean.",
            "The ratio of 'ep again' to 'ep' is the noise of this measurement.",
        ]
    )


def _time_ranks(rounds: int, say: Say) -> tuple[Times, dict, float]:
    """Return seconds and bytes of each contestant, and the imbalance of the load."""
    mesh = make_mesh(ep=RANKS)
    layers = {name: make(mesh) for name, make in _CONTESTANTS.items()}
    steps = {name: _step(layer, mesh) for name, layer in layers.items()}
    sent = {}
    for name, step in steps.items():
        mesh.ledger.clear()
        step(0)
        sent[name] = mesh.ledger.wire_bytes()
    load = layers["ep"].load
    assert load is not None
    contestants = {name: timed(step, mesh) for name, step in steps.items()}
    return interleave(contestants, rounds, say=say), sent, ep.imbalance(load.by_rank)


def _step(layer: ep.MoE, mesh: Mesh) -> Callable[[int], None]:
    generator = torch.Generator().manual_seed(mesh.rank)
    x_TD = torch.randn(TOKENS, CONFIG.hidden, generator=generator, requires_grad=True)

    def step(number: int) -> None:
        layer(x_TD).sum().backward()

    return step


def _reference() -> ep.MoE:
    model = ep.add_experts(build_model(CONFIG), EXPERTS, CHOICES)
    return ep.moe_layers(model)[0]


class Gathered(ep.ExpertParallelMoE):
    """The same experts on the same ranks, but every rank gathers all tokens."""

    def forward(self, x_TD: Tensor) -> Tensor:
        everyone = comm.gather_from_sequence(x_TD, self.ep)
        routes = self.route(everyone)  # every rank routes all tokens, so no rank sends its routes
        # MoE's own loop over the experts of this rank, each on its own tokens
        share = ep.MoE.through_experts(self, everyone, routes, ep.Load((), ()))
        return comm.reduce_scatter_to(share, self.ep)


def _parallel(mesh: Mesh) -> ep.MoE:
    return ep.ExpertParallelMoE(_reference(), mesh.ep, mesh.dp_cp)


def _gathered(mesh: Mesh) -> ep.MoE:
    return Gathered(_reference(), mesh.ep, mesh.dp_cp)


def _all_experts(mesh: Mesh) -> ep.MoE:
    return _reference()


_CONTESTANTS: dict[str, Callable[[Mesh], ep.MoE]] = {
    PEER: _gathered,
    "ep": _parallel,
    "all experts": _all_experts,
    "ep again": _parallel,
}
