"""Checks of contradictions: the value of each side, and last the value that decides."""

from __future__ import annotations

from course_lib.interview.checks import Numbers, note_000, note_001, note_002, signatures
from course_lib.layout import make_layout
from course_lib.planner.memory import state_bytes


def all_reduces() -> Numbers:
    """All-reduces per layer: of a forward pass, and of a training step."""
    return 2, 384 / 96, note_000.all_reduces_per_layer()[2]


def dp_volume() -> Numbers:
    """GB that a rank sends for 350 GB of gradients; 8 ranks decide."""
    return 350, 2 * 350, note_002.dp_sends_model_size()[2]


def transfers() -> Numbers:
    """Transfers of PP per sample and forward pass: 96 layers on 4 stages."""
    claimed, computed = note_002.transfer_per_layer()
    return claimed, note_002.transfers_of_4_stages()[0], computed


def optimizer_bytes() -> Numbers:
    """Bytes of Adam's state per parameter, in mixed precision."""
    return 4860 / 405, 60 / 7.5, state_bytes(1.0, recipe=16).optimizer


def nodes_of_dp() -> Numbers:
    """Nodes per DP group; tp=8, pp=2, dp=4 decides, in the order that has fewer."""
    layouts = [make_layout(64, order, tp=8, pp=2, dp=4) for order in ("tp-dp-pp", "tp-pp-dp")]
    nodes = (max(map(note_000.nodes_of, one.groups("dp"))) for one in layouts)
    return note_001.tp_and_dp_in_a_node()[0], note_002.dp_is_global()[0], min(nodes)


def replicas() -> Numbers:
    """Replicas of GPT-3 on 32 GPUs: the faster of two plans for 32 requests decides."""
    plans = [
        note_002.serving(note_002.GPT3, 32, 8, tp=8, dp=4),
        note_002.serving(note_002.GPT3, 32, 32, tp=8, pp=4),
    ]
    best = max(plans, key=lambda plan: plan.tokens_per_second)
    return 4, note_002.chosen_replicas()[1], best.configuration.dp


def exposed_dp() -> Numbers:
    """Share of DP's time in which a GPU waits: all of it, or none."""
    return 1, 0, note_002.exposed(note_002.training(), "dp")


def group_of_send() -> Numbers:
    """Ranks of the group of `dist.send`, with and without the argument."""
    claimed, computed = signatures.send_without_group()
    return claimed, computed, len(make_layout(64, "tp-pp-dp", tp=8, pp=4, dp=2).groups("pp")[0])


def syncs() -> Numbers:
    """Synchronizations of DP in GPT-3's pass over its data."""
    steps = note_001.syncs_per_epoch()[1]
    return steps, 1, steps


def gptj_throughput() -> Numbers:
    """Samples per second of GPT-J with TP=8: printed, and from 58 ms; 14.25 ms decide."""
    return 55, 1 / 0.058, 1e3 / note_002.gptj_tp_latency()[1]


def fit_on_one_card() -> Numbers:
    """Replicas of GPT-3, of which no GPU of 32 can store a copy."""
    return 1, 4, note_002.dp_needs_one_gpu()[1]
