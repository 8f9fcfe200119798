"""`course bench inference`: decoding with several layouts of eight ranks, by formula and measured.

A common claim about serving: if a model fits one GPU, eight replicas (DP8: 160 samples per second,
50 ms each) have three times the throughput of one model sharded over eight GPUs (TP8: 55 samples
per second, 58 ms); if it does not fit, TP belongs inside a node. This benchmark runs a scaled
version. A decode step of the whole model takes ``PACE["F"]`` to read the weights, for any batch
size, plus ``PACE["token"]`` per token in the batch. Compute time is padded by sleep, links are
emulated, messages and waiting are real. A rank of tp or pp has its share of both times.

The result, which the claim omits: it depends on the batch size. TP8 has the lower latency, because
each rank reads an eighth of the weights (the 58 ms of the claim do not divide the 50 ms of one
GPU). With few requests TP8 also has the higher throughput. DP8 wins when there are so many
requests that arithmetic and messages take longer than reading the weights.

The second part compares continuous and static batching, in counted steps and on one padded rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from course_lib import comm, inference, tp
from course_lib.bench.rounds import Say, quiet
from course_lib.comm.instruments.links import STEPS
from course_lib.inference import Replica, Scheduler, Served, Stage, StaticScheduler
from course_lib.launch import World
from course_lib.ledger import wire, wire_bytes_by_axis
from course_lib.mesh import Link, Links, make_mesh
from course_lib.model import ModelConfig, build_model
from course_lib.trace import TOO_BUSY, overshoot
from course_lib.view import Picture, serving_plot
from course_lib.view.serving import Model, Points

RANKS = 8
PACE = {"F": 0.320, "token": 0.016}  # seconds of a whole model: per step, and per token in it
INSIDE, BETWEEN = Link(1e-3, 2e6), Link(4e-3, 0.5e6)  # relative message times as on GPUs
BATCHES = (8, 32, 128)  # requests at once, all ranks together
MIXED = (2, 9, 3, 12, 2, 10, 4, 16)  # new tokens per request, in order of arrival


@dataclass(frozen=True)
class Layout:
    """A layout of eight ranks; each pipeline stage has one group of requests in flight."""

    dp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def name(self) -> str:
        """The name, such as tp4+pp2."""
        sizes = {"dp": self.dp, "tp": self.tp, "pp": self.pp}
        return "+".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)


ONE_NODE = (Layout(dp=8), Layout(tp=8), Layout(tp=4, pp=2))
TWO_NODES = (Layout(tp=8), Layout(dp=2, tp=4), Layout(tp=4, pp=2))
NODES = {"one node of 8": (8, ONE_NODE), "two nodes of 4": (4, TWO_NODES)}


def config_for(tokens: int) -> ModelConfig:
    """Return a small model, because its arithmetic must take less time than the pace."""
    return ModelConfig(layers=4, hidden=64, heads=8, kv_heads=8, ffn=128, max_seq_len=tokens + 2)


# --- by formula -----------------------------------------------------------------------------


def token_bytes(config: ModelConfig, layout: Layout) -> dict[str, Fraction]:
    """Return the bytes that all ranks together send per decoded token, by axis."""
    by_tp = layout.tp * inference.tp_wire_bytes(config, 1, 1, layout.tp)
    by_pp = layout.tp * inference.pp_wire_bytes(config, 1, 1, layout.pp)
    return {axis: sent for axis, sent in (("tp", by_tp), ("pp", by_pp)) if sent}


def predicted(
    config: ModelConfig, layout: Layout, links: Links, batch: float
) -> tuple[float, float]:
    """Return (tokens per second, seconds per token) with ``batch`` requests at once.

    A token takes one tick per stage. A tick is the time of the slowest stage: its share of the
    pace, its all-reduces, the choice of the token on the last stage, and the P2P transfer to the
    next stage.
    """
    own = batch / layout.dp / layout.pp  # requests per group
    compute = (PACE["F"] + own * PACE["token"]) / (layout.tp * layout.pp)
    row, pair = own * config.hidden * config.dtype.itemsize, own * 2 * 4
    inside = links.link(tuple(range(layout.tp)))
    reduces = 2 * config.layers // layout.pp
    all_reduce = call_seconds("all_reduce", row, layout.tp, inside)
    choice = call_seconds("all_gather", pair, layout.tp, inside)
    outside = max(all_reduce, choice) if layout.pp > 1 else all_reduce + choice
    hop_link = links.link((0, layout.tp))
    hop = hop_link.alpha + row / hop_link.beta if layout.pp > 1 else 0.0
    seconds = layout.pp * (compute + reduces * all_reduce + outside + hop)
    return batch / seconds, seconds


def call_seconds(op: str, payload: float, n: int, link: Link) -> float:
    """Return the seconds of a collective by the alpha-beta model; 0 for one rank."""
    if n == 1:
        return 0.0
    return STEPS[op](n) * link.alpha + payload * float(wire(op, 1, n)) / link.beta


# --- measured on ranks with padded compute --------------------------------------------------


def decode(layout: Layout, batch: int, tokens: int) -> Served:
    """Decode ``tokens`` for each prefilled request of this rank. Called in a rank."""
    mesh = make_mesh("tp-pp-dp", dp=layout.dp, tp=layout.tp, pp=layout.pp)
    config, slots = config_for(tokens), batch // layout.dp
    model = build_model(config)
    if layout.pp > 1:
        model = inference.cut(model, mesh)
    if layout.tp > 1:
        tp.parallelize(model, mesh.tp)
    server = (Stage if layout.pp > 1 else Replica)(model, mesh, slots)
    for wanted in (1, tokens):  # the first is a warm-up
        scheduler = prefilled(slots, wanted, layout.pp)
        comm.barrier(mesh.world)
        mesh.ledger.clear()
        mesh.trace.clear()
        if isinstance(server, Stage):
            served = inference.serve_pipeline(server, scheduler)
        else:
            served = inference.serve(server, scheduler)
    return served


def prefilled(slots: int, tokens: int, groups: int) -> Scheduler:
    """Return a scheduler after prefill: every request has a slot and a first token."""
    requests = inference.make_requests([[0]] * slots, tokens + 1)
    scheduler = Scheduler(requests, slots, groups=groups)
    scheduler.waiting.clear()
    scheduler.running = dict(enumerate(requests))
    scheduler.tokens = {request.number: [0] for request in requests}
    return scheduler


def serve_mixed(kind: type[Scheduler], slots: int) -> tuple[int, float]:
    """Serve requests of different lengths on one rank; return (steps, tokens per second)."""
    mesh = make_mesh()
    requests = inference.make_requests([[1, 2, 3]] * len(MIXED), MIXED)
    replica = Replica(build_model(config_for(max(MIXED) + 3)), mesh, slots)
    served = inference.serve(replica, kind(requests, slots))
    return served.steps, served.throughput


def compare(
    world: World, layout: Layout, links: Links, batch: int, tokens: int
) -> dict[str, float | int | str]:
    """Return throughput, latency and bytes of one layout and batch, measured and by formula."""
    share = 1 / (layout.tp * layout.pp)
    pace = {op: seconds * share for op, seconds in PACE.items()}
    results = world.run(decode, layout, batch, tokens, pace=pace, links=links, timeout=600)
    last = max(max(own) for served in results for own in served.times.values())
    throughput, latency = predicted(config_for(tokens), layout, links, batch)
    by_formula = sum(token_bytes(config_for(tokens), layout).values(), Fraction(0))
    return {
        "layout": layout.name,
        "batch": batch,
        "tokens_per_second": batch * tokens / last,
        "tokens_per_second_formula": throughput,
        "latency_ms": 1e3 * sum(served.latency for served in results) / len(results),
        "latency_ms_formula": 1e3 * latency,
        "bytes_per_token": float(
            sum(wire_bytes_by_axis(results.ledgers).values(), Fraction(0)) / (batch * tokens)
        ),
        "bytes_per_token_formula": float(by_formula),
        "overshoot": overshoot(results.traces),
    }


def measure(rounds: int = 20, say: Say = quiet) -> dict:
    """Measure every layout and batch size with rounds/2 tokens per request, then the batchings."""
    tokens = max(rounds // 2, 2)
    tables: dict[str, list[dict]] = {}
    with World(RANKS) as world:
        for name, (per_node, layouts) in NODES.items():
            links = Links(INSIDE, BETWEEN, per_node)
            tables[name] = []
            for layout, batch in product(layouts, BATCHES):
                say(f"{name}, {layout.name}, {batch} requests")
                tables[name].append(compare(world, layout, links, batch, tokens))
    batchings = {}
    with World(1) as world:
        for name, kind in (("continuous", Scheduler), ("static", StaticScheduler)):
            say(f"{name} batching")
            steps, speed = world.run(serve_mixed, kind, 4, pace={"F": 0.02, "token": 0.001})[0]
            batchings[name] = {"steps": steps, "tokens_per_second": speed}
    return {"ranks": RANKS, "tokens": tokens, "layouts": tables, "batchings": batchings}


def curves(result: dict, node: str) -> tuple[dict[str, Points], dict[str, Model]]:
    """Return the points and the model lines of a result of :func:`measure`."""
    per_node, layouts = NODES[node]
    links, config = Links(INSIDE, BETWEEN, per_node), config_for(result["tokens"])
    points: dict[str, dict[int, tuple[float, float]]] = {}
    for row in result["layouts"][node]:
        pair = row["tokens_per_second"], row["latency_ms"] / 1e3
        points.setdefault(row["layout"], {})[row["batch"]] = pair

    def model_of(layout: Layout) -> Model:
        return lambda batch: predicted(config, layout, links, batch)

    return dict(points), {layout.name: model_of(layout) for layout in layouts}


def picture(result: dict, node: str) -> Picture:
    """Return a picture of throughput and latency against requests at once, on ``node``."""
    late = max(row["overshoot"] for row in result["layouts"][node])
    busy = " The machine was too busy: compare the order, not the times." * (late > TOO_BUSY)
    return serving_plot(
        *curves(result, node),
        title=f"Eight ranks decode, {node}",
        note=f"Compute padded by sleep, links emulated, waiting measured; sleeps {late:.1%} too "
        f"long.{busy}",
    )


def text(result: dict) -> str:
    """Return the result as tables."""
    lines = [
        f"Decoding on {result['ranks']} ranks, compute padded by sleep: {PACE['F'] * 1e3:.0f} ms "
        f"per step of the whole model and {PACE['token'] * 1e3:.0f} ms per token, "
        f"{result['tokens']} tokens per request"
    ]
    for name, rows in result["layouts"].items():
        lines += ["", *_table(name, rows)]
    lines += ["", "Requests of 2 to 16 tokens in 4 slots of one rank, compute padded by sleep:"]
    for name, row in result["batchings"].items():
        speed = row["tokens_per_second"]
        lines.append(f"{name:<12}{row['steps']:>5} steps{speed:>8.0f} tokens per second")
    every = [row for rows in result["layouts"].values() for row in rows]
    if any(row["overshoot"] > TOO_BUSY for row in every):
        lines.append(
            "The machine was too busy: sleeps took more than 10 % too long. Compare the order, not "
            "the times."
        )
    return "\n".join(lines)


def _table(name: str, rows: Sequence[dict]) -> list[str]:
    lines = [
        f"{name:<16}{'requests':>9}{'tokens/s':>10}{'formula':>9}{'ms/token':>12}{'formula':>9}"
        f"{'kB/token':>12}{'formula':>9}"
    ]
    for row in rows:
        kilobytes = (row[key] / 1e3 for key in ("bytes_per_token", "bytes_per_token_formula"))
        counted, formula = kilobytes
        lines.append(
            f"{row['layout']:<16}{row['batch']:>9}{row['tokens_per_second']:>10.0f}"
            f"{row['tokens_per_second_formula']:>9.0f}{row['latency_ms']:>12.0f}"
            f"{row['latency_ms_formula']:>9.0f}{counted:>12.2f}{formula:>9.2f}"
        )
    return lines
