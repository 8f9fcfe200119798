"""The page of FSDP2 and DTensor trains as one process of the library does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import assert_equal
from torch import Tensor

from course_lib.launch import run
from course_lib.model import Decoder, ModelConfig, build_model
from course_lib.planner import configure, custom_model, hardware
from course_lib.planner.emit import emit

STEPS, SEQ, BATCH, VOCAB = 2, 16, 8, 260
SIZES = {"layers": 2, "hidden": 16, "heads": 4, "ffn": 24, "vocab": VOCAB, "max_seq_len": SEQ}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
LR, BETAS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0  # the page's


def page(family: str, kv_heads: int, dtype: str, gpus: int, **plan: Any) -> str:
    model = custom_model(family, **SIZES, kv_heads=kv_heads)
    configuration = configure(
        model, gpus, micro_batch=1, global_batch=BATCH, seq=SEQ, dtype=dtype, **plan
    )
    return emit("fsdp2", model, hardware("h100"), configuration).text


def reference(family: str, kv_heads: int, dtype: str) -> Decoder:
    """Biases are not 0 and norms not 1, so that mistakes show."""
    tied = family == "gpt"
    config = ModelConfig(**SIZES, family=family, kv_heads=kv_heads, tied=tied, dtype=DTYPES[dtype])
    model = build_model(config, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter.dtype), alpha=0.3)
    return model


def whole_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11 + step)
    tokens = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def serial(
    model: Decoder, batch: Callable[[int], tuple[Tensor, Tensor]]
) -> list[tuple[float, float]]:
    """Train in this process, all sequences at once; return (loss, gradient norm) by step."""
    optimizer = torch.optim.AdamW(model.parameters(), LR, BETAS, weight_decay=WEIGHT_DECAY)
    history = []
    for step in range(STEPS):
        total, tokens = model.loss_sum(*batch(step))
        (total / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        history.append((float((total / tokens).detach()), float(norm)))
    return history


def run_pages(
    pages: dict[str, tuple[str, dict[str, Tensor], int]],
) -> dict[str, tuple[list[tuple[float, float]], dict[str, Tensor]]]:
    """On a rank: train by each page; return (loss, norm) by step and all weights."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    results = {}
    for case, (text, weights, dp) in pages.items():
        names: dict[str, Any] = {"__name__": "page"}
        exec(compile(text, "page.py", "exec"), names)

        def batch(step: int, rank: int, dp: int = dp) -> tuple[Tensor, Tensor]:
            x, y = (one.tensor_split(dp)[rank] for one in whole_batch(step))
            return x, y

        history, model = names["train"](weights, batch, STEPS)
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        results[case] = (history, whole)
    return results


PLANS: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "tp2-zero3": ("llama", 2, "fp64", {"tp": 2, "zero": 3, "recompute": "full"}),
    "zero2": ("llama", 4, "fp64", {"zero": 2}),
    "tp2-zero1": ("llama", 2, "fp64", {"tp": 2, "zero": 1}),
    "tp2-replicated": ("llama", 4, "fp64", {"tp": 2, "zero": 0}),
    "tp4": ("llama", 4, "fp64", {"tp": 4}),
    "gpt-tied": ("gpt", 4, "fp64", {"tp": 2, "zero": 3}),
    "float32": ("llama", 2, "fp32", {"tp": 2, "zero": 3}),
}


def weights_of(model: Decoder) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in model.state_dict().items()}


@pytest.fixture(scope="module")
def trained():
    """All pages on the same 4 fresh ranks: DTensor caches groups, which kept ranks destroy."""
    pages = {
        case: (
            page(family, kv_heads, dtype, 4, **plan),
            weights_of(reference(family, kv_heads, dtype)),
            4 // plan.get("tp", 1),
        )
        for case, (family, kv_heads, dtype, plan) in PLANS.items()
    }
    return run(run_pages, pages, n=4, timeout=300)


@pytest.mark.parametrize("case", PLANS)
def test_page_equals_one_process(trained, case):
    """Adam hides a wrong factor of the gradients, so their norm is compared too.

    In float32 it also makes the weights of any two correct runs differ by up to 1.5e-4.
    """
    family, kv_heads, dtype, _ = PLANS[case]
    model = reference(family, kv_heads, dtype)
    start = weights_of(model)
    history = serial(model, whole_batch)
    bar, weight_bar = (1e-12, 1e-8) if dtype == "fp64" else (5e-6, 1.5e-4)
    for by_case in trained:
        got, whole = by_case[case]
        for step, expected in zip(got, history, strict=True):
            assert step == pytest.approx(expected, rel=bar)
        assert_equal(whole, model.state_dict(), weight_bar, "weights")
    moved = max(float((start[name] - one).abs().max()) for name, one in whole.items())
    assert moved > LR  # the optimizer ran


def test_page_as_a_script(tmp_path):
    """Under torchrun, with weights from a file and the page's own data."""
    model = reference("llama", 2, "fp64")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    text = page("llama", 2, "fp64", 2, zero=3)
    (tmp_path / "page.py").write_text(text)
    names: dict[str, Any] = {"__name__": "page", "__file__": "page.py"}
    exec(compile(text, "page.py", "exec"), names)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        halves = [names["batch"](step, rank) for rank in range(2)]
        x, y = (torch.cat(one) for one in zip(*halves, strict=True))
        return x, y

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "page.py", "weights.pt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    printed = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(printed) == 10
    expected = [loss for loss, _ in serial(model, batch)]
    assert printed[:STEPS] == pytest.approx(expected, abs=1e-6)
