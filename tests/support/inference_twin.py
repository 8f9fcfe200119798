"""The single-process reference of inference: no cache, every token from the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from course_lib import ep
from course_lib.inference import Request, make_requests
from course_lib.model import Decoder, ModelConfig, build_model

KV_HEADS = {1: 8, 2: 8, 3: 6, 4: 2, 8: 2}  # fewer than the ranks on 4 and 8
EXPERTS, CHOICES = 24, 2
GAP = 1e-9  # the two largest logits of every choice are farther apart


def sizes(n: int = 2, **changes: Any) -> ModelConfig:
    """A model that 1, 2, 3, 4 and 8 ranks can cut, with a vocabulary that they cannot."""
    given = {"layers": 2, "hidden": 48, "heads": 24, "kv_heads": KV_HEADS[n], "ffn": 48}
    given |= {"max_seq_len": 48, "vocab": 259, "dtype": torch.float64}
    return ModelConfig(**(given | changes))


GPT = {"family": "gpt", "tied": True}


@torch.no_grad()
def make_model(config: ModelConfig, experts: bool = False) -> Decoder:
    """Weights large enough that texts differ and do not repeat; biases and norms disturbed."""
    model = build_model(config, seed=3)
    if experts:
        ep.add_experts(model, EXPERTS, CHOICES, seed=4)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter.dtype), alpha=0.3)
        else:
            parameter.mul_(3)
    return model.eval()


def requests_of(count: int = 5) -> list[Request]:
    """Prompts of 1 to 20 tokens, and 1 to 12 new ones."""
    prompts = [[1, 2, 3], [200] * 7, list(range(20)), [5], [9, 8, 7, 6, 5], [250, 3], [11], [4] * 9]
    return make_requests(prompts[:count], [6, 9, 3, 12, 1, 5, 7, 4][:count])


@torch.no_grad()
def recompute(model: Decoder, request: Request) -> tuple[list[int], Tensor]:
    """(tokens, logits of each (M, V)) by the likeliest token, from scratch for every token."""
    text, rows = list(request.prompt), []
    for _ in range(request.max_new_tokens):
        rows.append(model(torch.tensor([text]))[0, -1])
        first, second = rows[-1].topk(2).values.tolist()
        assert first - second > GAP, "two tokens are too close to call: take another seed"
        text.append(int(rows[-1].argmax()))
    return text[len(request.prompt) :], torch.stack(rows)


@cache
def twin(config: ModelConfig, experts: bool = False, count: int = 5) -> dict[int, list[int]]:
    """The tokens of every request."""
    model = make_model(config, experts)
    return {r.number: recompute(model, r)[0] for r in requests_of(count)}


@torch.no_grad()
def expert_counts(config: ModelConfig, requests: Sequence[Request]) -> list[list[int]]:
    """How many pairs of all tokens of ``requests`` go to each expert, by layer."""
    model, tokens = make_model(config, experts=True), twin(config, True)
    totals = [[0] * EXPERTS for _ in range(config.layers)]
    for request in requests:
        model(torch.tensor([[*request.prompt, *tokens[request.number][:-1]]]))
        for layer, total in zip(ep.moe_layers(model), totals, strict=True):
            assert layer.load is not None
            total[:] = [a + b for a, b in zip(total, layer.load.kept[0], strict=True)]
    return totals
