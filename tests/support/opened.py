"""Which files of the library a reader opens to follow one forward and backward of a technique.

A file counts when one of its lines runs on any rank; of a pipeline in the second step. Left out are
the model, which every technique shares, and what measures: ledger, trace, mesh (its axes are plain
data) and the instruments of comm.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

import course_lib
from course_lib import cp, dp, ep, pp, sp, tp, zero
from course_lib.data import batch
from course_lib.launch import run
from course_lib.mesh import make_mesh
from course_lib.model import ModelConfig, build_model
from course_lib.schedule import named

ROOT = Path(course_lib.__file__).parent
LEFT_OUT = ("model/", "ledger.py", "trace/", "mesh/", "comm/instruments/")
CONFIG = ModelConfig(layers=4, hidden=16, heads=4, kv_heads=4, ffn=32, vocab=259, max_seq_len=16)


@contextmanager
def files_run(found: set[str]) -> Iterator[None]:
    """Add to ``found`` the files of course_lib in which a line runs inside."""

    def trace(frame: FrameType, _event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if ROOT in path.parents and frame.f_code.co_name != "<module>":
            found.add(str(path.relative_to(ROOT)))

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def _data_parallel(found: set[str]) -> None:
    mesh, model, (tokens, targets) = (
        make_mesh(),
        build_model(CONFIG),
        batch(0, seed=0, batch_size=2, seq_len=16),
    )
    sync = dp.Overlapped(model.parameters(), mesh.dp)
    with files_run(found):
        model.loss_sum(tokens, targets)[0].backward()
        sync.finish()


def _zero_3(found: set[str]) -> None:
    mesh, model, (tokens, targets) = (
        make_mesh(),
        build_model(CONFIG),
        batch(0, seed=0, batch_size=2, seq_len=16),
    )
    z = zero.Zero3(model, list(model.blocks), mesh.dp, torch.optim.AdamW)
    with files_run(found):
        model.loss_sum(tokens, targets)[0].backward()
        z.finish()


def _tensor_parallel(found: set[str]) -> None:
    mesh, (tokens, targets) = make_mesh(tp=2), batch(0, seed=0, batch_size=2, seq_len=16)
    model = tp.parallelize(build_model(CONFIG), mesh.tp)
    with files_run(found):
        model.loss_sum(tokens, targets)[0].backward()


def _sequence_parallel(found: set[str]) -> None:
    mesh, (tokens, targets) = make_mesh(tp=2), batch(0, seed=0, batch_size=2, seq_len=16)
    model = tp.parallelize(build_model(CONFIG), mesh.tp, sp.REGION)
    with files_run(found):
        model.loss_sum(tokens, targets)[0].backward()


def _context_parallel(found: set[str]) -> None:
    mesh, (tokens, targets) = make_mesh(cp=2), batch(0, seed=0, batch_size=2, seq_len=16)
    model = cp.parallelize(build_model(CONFIG), cp.ring_attention, mesh.cp, cp.ZIGZAG)
    tokens, targets, positions = cp.shard(tokens, targets, mesh.cp, cp.ZIGZAG)
    with files_run(found):
        model.cross_entropy(model(tokens, positions), targets)[0].backward()


def _expert_parallel(found: set[str]) -> None:
    mesh, (tokens, targets) = make_mesh(ep=2), batch(0, seed=0, batch_size=2, seq_len=16)
    model = ep.add_experts(build_model(CONFIG), 4, 2)
    ep.parallelize(model, mesh.ep, mesh.dp_cp)
    with files_run(found):
        model.loss_sum(tokens, targets)[0].backward()


def _pipeline(found: set[str]) -> None:
    mesh, (tokens, targets) = make_mesh(pp=4), batch(0, seed=0, batch_size=4, seq_len=16)
    schedule = named.one_f_one_b(4, 4)
    stages = pp.make_stages(build_model(CONFIG), schedule, mesh.pp.rank)
    micro_batches = list(zip(tokens.chunk(4), targets.chunk(4), strict=True))

    def loss(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()) / 4

    pp.run(schedule, stages, mesh, micro_batches, loss)  # the first step validates the schedule
    with files_run(found):
        pp.run(schedule, stages, mesh, micro_batches, loss)


TECHNIQUES: dict[str, tuple[Callable[[set[str]], None], int]] = {
    "DP": (_data_parallel, 2),
    "ZeRO-3": (_zero_3, 2),
    "TP": (_tensor_parallel, 2),
    "SP": (_sequence_parallel, 2),
    "CP (zig-zag ring)": (_context_parallel, 2),
    "EP": (_expert_parallel, 2),
    "PP (1F1B)": (_pipeline, 4),
}


def _measured(name: str) -> set[str]:
    found: set[str] = set()
    TECHNIQUES[name][0](found)
    return found


def opened(name: str) -> list[str]:
    """The files that run on any rank in one forward and backward of a technique."""
    results = run(_measured, name, n=TECHNIQUES[name][1], timeout=120)
    found = set().union(*results)
    return sorted(file for file in found if not file.startswith(LEFT_OUT))
