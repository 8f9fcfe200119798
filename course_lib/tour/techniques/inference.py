"""The tour's rows of inference: nothing is trained; requests are answered.

What stands for losses here is, for each request, the largest absolute difference of its logits to
those of the twin, which computes every token anew from the whole text before it; so the twin's own
are zeros. Of a request of which a rank has another token it is infinite. The bytes sent are those
of the whole decode, and what is kept is no activation for backward but the past: the cache, or, in
the twin, the text.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import inf

import torch
from torch import Tensor

from course_lib import comm, inference, pp, tp
from course_lib.inference import Request, Scheduler, Stage, Work
from course_lib.mesh import make_mesh
from course_lib.model import Decoder, ModelConfig
from course_lib.recompute import ID_BYTES
from course_lib.tour.technique import Job, Report, Technique
from course_lib.tp import VocabHead, formulas
from course_lib.tp.layers import padded_rows
from course_lib.trace.memory import state_bytes

TP, PP = 2, 2
TWIN = "serial-decode"


def exact(job: Job) -> Job:
    """So many digits that no two tokens are equally likely."""
    return replace(job, config=replace(job.config, dtype=torch.float64))


def requests_of(job: Job) -> list[Request]:
    """The beginnings of the first batch's sequences, of different lengths."""
    texts = job.rows_of(0, 0, 1)[0].tolist()
    half = job.seq_len // 2
    prompts = [text[: half - 3 * number % half] for number, text in enumerate(texts)]
    return inference.make_requests(prompts, max(half // 4, 2))


def slots_of(job: Job) -> int:
    """Half the requests wait until others are done."""
    return PP * max(job.sequences // 2 // PP, 1)


@torch.no_grad()
def recompute(model: Decoder, request: Request) -> tuple[Tensor, Tensor]:
    """(text (1, S), logits of each new token): the whole text again for every token."""
    text_1S, rows = torch.tensor([request.prompt]), []
    for _ in range(request.max_new_tokens):
        rows.append(model(text_1S)[0, -1])
        text_1S = torch.cat((text_1S, rows[-1].argmax().view(1, 1)), 1)
    return text_1S, torch.stack(rows)


def decode_serially(job: Job) -> Report:
    """The twin: one process, no cache; it keeps the texts."""
    model = exact(job).model()
    texts = [recompute(model, request)[0] for request in requests_of(job)]
    return Report([0.0] * len(texts), state_bytes(model), sum(text.nbytes for text in texts))


def decode_in_parallel(job: Job) -> Report:
    """Two stages of two ranks each; two groups of requests alternate."""
    mesh = make_mesh("tp-pp-dp", tp=TP, pp=PP)
    model = tp.parallelize(inference.cut(exact(job).model(), mesh), mesh.tp)
    seen: dict[int, list[Tensor]] = {}
    choose = inference.chooser(model)

    def watched(logits: Tensor, work: Work) -> Tensor:
        for number, row in zip(work.requests, logits, strict=True):
            seen.setdefault(number, []).append(row)
        return choose(logits, work)

    stage = Stage(model, mesh, slots_of(job), watched)
    scheduler = Scheduler(requests_of(job), slots_of(job), groups=PP)
    tokens = inference.serve_pipeline(stage, scheduler).tokens
    twin, first = exact(job).model(), mesh.tp.rank * padded_rows(job.config.vocab, TP)
    differences = []
    for request in requests_of(job):
        text_1S, logits_MV = recompute(twin, request)
        if tokens[request.number] != text_1S[0, len(request.prompt) :].tolist():
            differences.append(inf)
        elif isinstance(model.head, VocabHead):
            own_MVt = torch.stack(seen[request.number])
            want_MVt = logits_MV[:, first : first + own_MVt.shape[1]]
            differences.append(float((own_MVt[:, : want_MVt.shape[1]] - want_MVt).abs().max()))
        else:
            differences.append(0.0)
    largest = comm.all_reduce_max(torch.tensor(differences), mesh.world, control=True)
    return Report(largest.tolist(), state_bytes(model), stage.cache.nbytes)


# --- formulas -------------------------------------------------------------------------------


def text_bytes(job: Job) -> int:
    """Every token of every request."""
    return ID_BYTES * sum(r.kv_positions + 1 for r in requests_of(job))


def sent(job: Job) -> dict[str, Fraction]:
    """All ranks together, the whole decode."""
    config, counts = exact(job).config, inference.counts(requests_of(job))
    return {
        "tp": TP * inference.tensor_bytes(config, *counts, TP),
        "pp": TP * inference.pipeline_bytes(config, *counts, PP),
    }


def stage_bytes(job: Job) -> int:
    """Parameters of the fullest rank: its layers' shares, and one end of the model."""
    config = exact(job).config

    def parts(layers: int) -> int:
        return formulas.parameters_per_rank(replace(config, layers=layers, tied=False), TP)

    table = padded_rows(config.vocab, TP) * config.hidden
    norm, positions = _end_parameters(config)
    first, last = pp.partition(config.layers, PP)
    fullest = max(parts(first) - table - norm, parts(last) - table - positions)
    return fullest * config.dtype.itemsize


def _end_parameters(config: ModelConfig) -> tuple[int, int]:
    """(of the last norm, of learned positions)."""
    if config.family == "llama":
        return config.hidden, 0
    return 2 * config.hidden, config.max_seq_len * config.hidden


def cache_bytes(job: Job) -> int:
    """Of the rank with the most layers."""
    config, layers = exact(job).config, pp.partition(job.config.layers, PP)
    slots, capacity = slots_of(job), config.max_seq_len
    return inference.cache_bytes(config, slots, capacity, layers=max(layers), tp=TP)


INFERENCE = [
    Technique(
        name=TWIN,
        lesson="13",
        sentence="One process answers requests and computes every token from the whole text "
        "before it: the twin of the next row, in float64. It keeps the text alone.",
        mesh={},
        train=decode_serially,
        formula=lambda job: {},
        state_formula=lambda job: exact(job).parameter_bytes,
        peak_activation_formula=text_bytes,
        twin=TWIN,
    ),
    Technique(
        name="inference",
        lesson="13",
        sentence="The same tokens from two stages of two ranks, which keep keys and values; "
        "requests join as others end, and two groups alternate. Off by: the logits. Sent: in all.",
        mesh={"tp": TP, "pp": PP},
        train=decode_in_parallel,
        formula=sent,
        state_formula=stage_bytes,
        peak_activation_formula=cache_bytes,
        twin=TWIN,
    ),
]
