"""The tour's rows of inference: no training; requests are answered.

Instead of a loss, each request has the largest absolute difference of its logits from those of the
reference, which computes every token again from the whole text before it. The reference itself
therefore has zeros. If a rank has another token, the difference is infinite. The bytes sent are
those of the whole decode. Instead of activations, the rows count the KV cache, or the text in the
reference.
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
REFERENCE = "serial-decode"


def exact(job: Job) -> Job:
    """Return the job in float64, so that no two tokens are equally likely."""
    return replace(job, config=replace(job.config, dtype=torch.float64))


def requests_of(job: Job) -> list[Request]:
    """Return requests: prefixes of the first batch's sequences, of different lengths."""
    texts = job.rows_of(0, 0, 1)[0].tolist()
    half = job.seq_len // 2
    prompts = [text[: half - 3 * number % half] for number, text in enumerate(texts)]
    return inference.make_requests(prompts, max(half // 4, 2))


def slots_of(job: Job) -> int:
    """Return the number of slots: half of the requests wait until others are done."""
    return PP * max(job.sequences // 2 // PP, 1)


@torch.no_grad()
def recompute(model: Decoder, request: Request) -> tuple[Tensor, Tensor]:
    """Return (text (1, S), logits of each new token), computed from the whole text each time."""
    text_1S, rows = torch.tensor([request.prompt]), []
    for _ in range(request.max_new_tokens):
        rows.append(model(text_1S)[0, -1])
        text_1S = torch.cat((text_1S, rows[-1].argmax().view(1, 1)), 1)
    return text_1S, torch.stack(rows)


def decode_reference(job: Job) -> Report:
    """Decode as the reference does: one process, no cache; it stores the texts."""
    model = exact(job).model()
    texts = [recompute(model, request)[0] for request in requests_of(job)]
    return Report([0.0] * len(texts), state_bytes(model), sum(text.nbytes for text in texts))


def decode_in_parallel(job: Job) -> Report:
    """Decode on two stages of two ranks each; two groups of requests alternate."""
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
    reference, first = exact(job).model(), mesh.tp.rank * padded_rows(job.config.vocab, TP)
    differences = []
    for request in requests_of(job):
        text_1S, logits_MV = recompute(reference, request)
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
    """Return the bytes of all tokens of all requests."""
    return ID_BYTES * sum(r.kv_positions + 1 for r in requests_of(job))


def sent(job: Job) -> dict[str, Fraction]:
    """Return the bytes that all ranks together send in the whole decode, by axis."""
    config, counts = exact(job).config, inference.counts(requests_of(job))
    return {
        "tp": TP * inference.tp_wire_bytes(config, *counts, TP),
        "pp": TP * inference.pp_wire_bytes(config, *counts, PP),
    }


def stage_bytes(job: Job) -> int:
    """Return the parameter bytes of the rank with the most: shards of its layers, and of the
    embedding or the LM head."""
    config = exact(job).config

    def parts(layers: int) -> int:
        return formulas.parameters_per_rank(replace(config, layers=layers, tied=False), TP)

    table = padded_rows(config.vocab, TP) * config.hidden
    norm, positions = _end_parameters(config)
    first, last = pp.partition(config.layers, PP)
    fullest = max(parts(first) - table - norm, parts(last) - table - positions)
    return fullest * config.dtype.itemsize


def _end_parameters(config: ModelConfig) -> tuple[int, int]:
    """Return the parameter counts (of the last norm, of learned positions)."""
    if config.family == "llama":
        return config.hidden, 0
    return 2 * config.hidden, config.max_seq_len * config.hidden


def cache_bytes(job: Job) -> int:
    """Return the bytes of the KV cache, of the rank with the most layers."""
    config, layers = exact(job).config, pp.partition(job.config.layers, PP)
    slots, capacity = slots_of(job), config.max_seq_len
    return inference.cache_bytes(config, slots, capacity, layers=max(layers), tp=TP)


INFERENCE = [
    Technique(
        name=REFERENCE,
        lesson="13",
        sentence="One process answers requests and computes every token from the whole text "
        "before it: the reference of the next row, in float64. It stores only the text.",
        mesh={},
        train=decode_reference,
        formula=lambda job: {},
        state_formula=lambda job: exact(job).parameter_bytes,
        peak_activation_formula=text_bytes,
        reference=REFERENCE,
    ),
    Technique(
        name="inference",
        lesson="13",
        sentence="Two stages of two ranks each produce the same tokens with a KV cache. A request "
        "starts when another ends, and two groups alternate. Off by is for logits; bytes sent are "
        "for the whole decode.",
        mesh={"tp": TP, "pp": PP},
        train=decode_in_parallel,
        formula=sent,
        state_formula=stage_bytes,
        peak_activation_formula=cache_bytes,
        reference=REFERENCE,
    ),
]
