"""Lesson 01: wrong and right answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attack import Attacks
from torch import Tensor, nn

from course_lib import comm
from course_lib.grading import registry
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.graders.judge import lesson_01 as judge
from course_lib.grading.graders.runner.lesson_01 import WORDS, Machine
from course_lib.mesh import Axis, make_mesh
from course_lib.model import ModelConfig, parameter_count
from course_lib.trace import state_bytes

REFUSAL = "this is what you are asked to write"
Tensors = Sequence[Tensor]
Count = Callable[[Tensors], int]


def _table(**entries: Any) -> dict[str, Any]:
    return {**registry.find("01-1").wanted, **entries}  # type: ignore[attr-defined]


# --- 01-2
def _by_seconds(n: int, width: int, per_parameter: int, flops: float, gbits: int) -> float:
    """Right too: the seconds of both for one parameter."""
    sending = 16 * width * (n - 1) / (n * gbits * 10**9)
    return sending / (per_parameter / flops)


# --- 01-3
def _on_meta(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool
) -> int:
    """Right too: modules without memory."""
    kv = hidden // heads * kv_heads
    linears = [(hidden, hidden)] * 2 + [(hidden, kv)] * 2 + [(hidden, ffn)] * 3
    with torch.device("meta"):
        block = nn.ModuleList(nn.Linear(*shape, bias=False) for shape in linears)
        block.extend([nn.RMSNorm(hidden), nn.RMSNorm(hidden)])
        ends = nn.ModuleList([nn.Embedding(vocab, hidden), nn.RMSNorm(hidden)])
        if not tied:
            ends.append(nn.Linear(hidden, vocab, bias=False))
    sizes = [sum(p.numel() for p in part.parameters()) for part in (block, ends)]
    return layers * sizes[0] + sizes[1]


class _Remembers:
    """Right once: calls with equal arguments at ``places`` return the result of the first."""

    def __init__(self, answer: Answer, *places: int) -> None:
        self.answer, self.places = answer, places
        self.known: dict[Any, Any] = {}

    def __call__(self, *given: Any) -> Any:
        key = tuple(given[place] for place in self.places)
        return self.known.setdefault(key, self.answer(*given))


def _by_a_share(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool
) -> int:
    """Keys and values as a share of the queries, in floats that are cut off."""
    share = 1 + kv_heads / heads
    block = int(hidden * 2 * share * hidden) + 3 * hidden * ffn + 2 * hidden
    return layers * block + hidden + vocab * hidden * (2 - tied)


_on_meta(1, 2, 1, 1, 1, 1, tied=False)  # torch's imports take longer than a deadline


# --- 01-4
def _measure(
    machine: Machine,
    gradient: Tensor,
    axis: Axis,
    *,
    now: Callable[[], float] | None = None,
    together: bool = True,
    maximum: bool = True,
    swapped: bool = False,
    share: Callable[[int], float] = lambda n: 2 * (n - 1) / n,
) -> tuple[float, str]:
    """Right, or with a mistake."""
    now = now or machine.now
    start = now()
    machine.compute()
    computed = now() - start
    if together:
        machine.barrier()
    start = now()
    machine.all_reduce(gradient)
    times = torch.tensor([computed, now() - start])
    if maximum:
        times = comm.all_reduce_max(times, axis)
    longer = (times[0] > times[1]).item() != swapped
    return share(axis.size) * gradient.nbytes, "compute" if longer else "network"


def _right_by_minimum(machine: Machine, gradient: Tensor, axis: Axis) -> list[Any]:
    """No barrier: who comes last does not wait, so that the shortest all-reduce is the true one."""
    times = [machine.now()]
    machine.compute()
    times.append(machine.now())
    machine.all_reduce(gradient)
    times.append(machine.now())
    mine = torch.tensor([times[1] - times[0], times[1] - times[2]])
    computed, sent = comm.all_reduce_max(mine, axis).tolist()
    n = axis.size
    return [gradient.nbytes * 2 * (n - 1) / n, WORDS[computed < -sent]]


def _but(**mistake: Any) -> Answer:
    return lambda machine, gradient, axis: _measure(machine, gradient, axis, **mistake)


def _always(limit: str) -> Answer:
    return lambda machine, gradient, axis: (
        2 * (axis.size - 1) / axis.size * gradient.nbytes,
        limit,
    )


def _other_word(*given: Any) -> tuple[float, str]:
    return _measure(*given)[0], "communication"


def _of_a_piece(machine: Machine, gradient: Tensor, axis: Axis) -> tuple[float, str]:
    """Sends a quarter of the gradient and multiplies."""
    start = machine.now()
    machine.compute()
    computed = machine.now() - start
    machine.barrier()
    start = machine.now()
    machine.all_reduce(gradient[: len(gradient) // 4])
    times = torch.tensor([computed, 4 * (machine.now() - start)])
    longest = comm.all_reduce_max(times, axis)
    n = axis.size
    return 2 * (n - 1) / n * gradient.nbytes, WORDS[int(longest[0] <= longest[1])]


def _over_ranks(reduce: Callable[[list[float]], float]) -> Answer:
    """Return an answer that makes one time of the ranks' times by ``reduce``."""

    def limit(machine: Machine, gradient: Tensor, axis: Axis) -> tuple[float, str]:
        start = machine.now()
        machine.compute()
        computed = machine.now() - start
        machine.barrier()
        start = machine.now()
        machine.all_reduce(gradient)
        own = torch.tensor([[computed, machine.now() - start]])
        gathered = comm.all_gather(own, axis).T.tolist()
        n = axis.size
        longer = reduce(gathered[0]) > max(gathered[1])
        return 2 * (n - 1) / n * gradient.nbytes, "Compute" if longer else "NETWORK"

    return limit


def _another_tensor(machine: Machine, gradient: Tensor, axis: Axis) -> tuple[float, str]:
    """Sums ones in place of the gradient."""
    return _measure(machine, torch.ones_like(gradient), axis)


def _early(machine: Machine, gradient: Tensor, axis: Axis) -> tuple[float, str]:
    """Sends before it computes: here all ranks begin together."""
    machine.barrier()
    times = [machine.now()]
    for part in (lambda: machine.all_reduce(gradient), machine.compute):
        part()
        times.append(machine.now())
    longest = comm.all_reduce_max(torch.tensor([times[1] - times[0], times[2] - times[1]]), axis)
    return 2 * (axis.size - 1) / axis.size * gradient.nbytes, WORDS[int(longest.argmin())]


def _float32_bytes(machine: Machine, gradient: Tensor, axis: Axis) -> tuple[float, str]:
    _, word = _measure(machine, gradient, axis)
    return 8 * (axis.size - 1) / axis.size * gradient.numel(), word


def _over_the_world(machine: Machine, gradient: Tensor, axis: Axis) -> tuple[float, str]:
    sent, word = _measure(machine, gradient, axis)
    dist.all_reduce(torch.zeros(1))
    return sent, word


def _first_answer(machine: Machine, gradient: Tensor, axis: Axis) -> tuple[float, str]:
    """Measures in the first call only."""
    found = _measure(machine, gradient, axis)
    return _remembered.setdefault("limit", found)


_remembered: dict[str, tuple[float, str]] = {}


# --- 01-5
def _gathered(own: Any) -> list[int]:
    mine = torch.tensor(int(own))
    parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return [int(part) for part in parts]


def _fullest_of(sizes: list[int]) -> tuple[int, int]:
    return sizes.index(max(sizes)), max(sizes)


def _right(tensors: Tensors) -> tuple[int, int]:
    return _fullest_of(_gathered(judge._storages(tensors)))


def _right_by_max(tensors: Tensors) -> list[int]:
    """Rank and bytes in one number; the largest one wins."""
    n, seen, own = dist.get_world_size(), set(), 0
    for t in tensors:
        storage = t.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            own += storage.nbytes()
    packed = torch.tensor(own * n + dist.get_rank())
    dist.all_reduce(packed, op=dist.ReduceOp.MAX)
    return [int(packed) % n, int(packed) // n]


def _counting(count: Count) -> Answer:
    return lambda tensors: _fullest_of(_gathered(count(tensors)))


def _putting(choose: Callable[[list[int]], Any]) -> Answer:
    return lambda tensors: choose(_gathered(judge._storages(tensors)))


def _sends_tensors(tensors: Tensors) -> tuple[int, int]:
    """Right numbers, after everything was sent."""
    dist.all_gather_object([None] * dist.get_world_size(), list(tensors))
    return _right(tensors)


def _by_library(tensors: Tensors) -> tuple[int, int]:
    return _fullest_of(_gathered(state_bytes(tensors).total))


def _by_mesh(tensors: Tensors) -> tuple[int, int]:
    own = torch.tensor([judge._storages(tensors)])
    return _fullest_of(comm.all_gather(own, make_mesh().dp).tolist())


def _in_float(tensors: Tensors) -> tuple[int, int]:
    """Sizes are sent as float32."""
    own = torch.tensor([float(judge._storages(tensors))])
    parts = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return _fullest_of([int(part) for part in parts])


def _misses_the_last(tensors: Tensors) -> tuple[int, int]:
    return _fullest_of(_gathered(judge._storages(tensors))[:-1] or [judge._storages(tensors)])


def _not_waited(tensors: Tensors) -> tuple[int, int]:
    own = torch.tensor(judge._storages(tensors) * 8 + dist.get_rank())
    dist.all_reduce(own, op=dist.ReduceOp.MAX, async_op=True)
    time.sleep(0.05)
    return int(own) % 8, int(own) // 8


def _writes(tensors: Tensors, place: int = 0) -> tuple[int, int]:
    with torch.no_grad():
        tensors[place].fill_(1)
    return _right(tensors)


ATTACKS = {
    "01-1": Attacks(
        wrong=(
            Wrong(_table(block="128"), words="expected a number, not the text"),
            Wrong(_table(binds="net"), words="'binds': 'net' is not right"),
            Wrong(_table(GPUs=None), words="'GPUs' is not filled in yet"),
        ),
        right=(
            _table(**{"state, GiB": 536.4418029785156, "sent, GB": 135.0}),
            _table(**{"sending, s": 27 / 10, "computing, s": 54 / 25}),
            _table(**{"sending, s": Decimal("2.7")}, GPUs=np.int64(8), binds="Network"),
        ),
    ),
    "01-2": Attacks(
        wrong=(
            Wrong(lambda *given: None, words="expected a number of tokens, got None"),
            Wrong(
                lambda n, width, per_parameter, flops, gbits: gbits["beta"],
                words="raised TypeError",
            ),
            Wrong(lambda *given: judge._least(*given) * (1 + 1e-6), words="expected "),
            Wrong(lambda *given: round(judge._least(*given), -3), words="expected "),
            Wrong(lambda *given: str(judge._least(*given)), words="expected a number of tokens"),
            Wrong(_Remembers(judge._least, 0), words="expected "),
            Wrong(_Remembers(judge._least, 0, 1, 2, 3), words="expected "),
            Wrong(_Remembers(judge._least, 0, 2, 3, 4), words="expected "),
        ),
        right=(
            _by_seconds,
            lambda *given: torch.tensor(judge._least(*given), dtype=torch.float64),
            lambda *given: np.float64(judge._least(*given)),
        ),
    ),
    "01-3": Attacks(
        wrong=(
            Wrong(lambda *given: parameter_count(ModelConfig()), words=REFUSAL),
            Wrong(lambda *given: None, words="expected a whole number, got None"),
            Wrong(lambda *given: judge._count(*given) + 0.5, words="whole number of parameters"),
            Wrong(lambda *given: int(np.float32(judge._count(*given))), words="rounded"),
            Wrong(_by_a_share, words="The count was cut off"),
            Wrong(_Remembers(judge._count, 0, 1, 2, 3, 5, 6), words="expected "),
            Wrong(_Remembers(judge._count, 0, 1, 2, 4, 5, 6), words="expected "),
        ),
        right=(_on_meta, lambda *given: float(_on_meta(*given)), lambda *g: np.int64(_on_meta(*g))),
    ),
    "01-4": Attacks(
        wrong=(
            Wrong(lambda *given: None, words="expected 2 values (bytes, limit)"),
            Wrong(_other_word, words='expected "compute" or "network"'),
            Wrong(_but(share=lambda n: 1.0), words="that is the gradient itself"),
            Wrong(_but(share=lambda n: (n - 1) / n), words="two halves"),
            Wrong(_but(share=lambda n: 2.0), words="not 2"),
            Wrong(_but(share=lambda n: (n - 1) / n / 2), words="these are elements"),
            Wrong(_but(share=lambda n: 2.0 * (n - 1)), words="not 2"),
            Wrong(_but(swapped=True), words="the limit is what takes longer"),
            Wrong(_but(now=time.perf_counter), words="by machine.now()"),
            Wrong(_but(together=False), words="the wait for the rank that is late"),
            Wrong(_but(maximum=False), words="the ranks disagree"),
            Wrong(_but(together=False, maximum=False), words="the ranks disagree"),
            Wrong(_always("compute"), words="the limit is what takes longer"),
            Wrong(_always("network"), words="the limit is what takes longer"),
            Wrong(_of_a_piece, words="expected machine.all_reduce(gradient) on rank 0"),
            Wrong(_another_tensor, words="got compute, then all_reduce of another tensor"),
            Wrong(_early, words="expected machine.compute() before"),
            Wrong(_float32_bytes, words="not every element has 4 bytes"),
            Wrong(_over_ranks(lambda times: sum(times) / len(times)), words="not the mean"),
            Wrong(_over_ranks(sum), words="the times of the ranks are added"),
            Wrong(_over_ranks(lambda times: times[0]), words="rank 0's time"),
            Wrong(_over_ranks(min), words="not the minimum"),
            Wrong(_over_the_world, words="to use the group of the axis"),
            Wrong(_first_answer, words="in the second call"),
        ),
        right=(_measure, _right_by_minimum, _over_ranks(max)),
    ),
    "01-5": Attacks(
        wrong=(
            Wrong(lambda tensors: None, words="expected 2 values (rank, bytes)"),
            Wrong(
                lambda tensors: (dist.get_rank(), judge._storages(tensors)),
                words="every rank names itself",
            ),
            Wrong(_counting(lambda tensors: sum(t.nbytes for t in tensors)), words="several times"),
            Wrong(_counting(judge._parts_shown), words="a storage stays in memory in full"),
            Wrong(_counting(lambda tensors: sum(t.numel() for t in tensors)), words="elements"),
            Wrong(
                _counting(lambda tensors: sum(t.untyped_storage().nbytes() for t in tensors)),
                words="several times",
            ),
            Wrong(
                _putting(lambda sizes: (max(sizes), sizes.index(max(sizes)))),
                words="these are exchanged",
            ),
            Wrong(_putting(lambda sizes: (0, sum(sizes))), words="all ranks store together"),
            Wrong(
                _putting(lambda sizes: (sizes.index(min(sizes)), min(sizes))),
                words="the rank with the least",
            ),
            Wrong(
                _putting(lambda sizes: ((sizes.index(max(sizes)) + 1) % len(sizes), max(sizes))),
                words="does not have them",
            ),
            Wrong(_sends_tensors, words="sizes are enough"),
            Wrong(_by_library, words=REFUSAL),
            Wrong(_by_mesh, words=REFUSAL),
            Wrong(_in_float, words="the bytes were rounded"),
            Wrong(_misses_the_last, words="the last rank is left out"),
            Wrong(_not_waited, words="never waited for it"),
            Wrong(_writes, words="expected the tensors to be unchanged"),
            Wrong(
                lambda tensors: _writes(tensors, 2), words="expected the tensors to be unchanged"
            ),
        ),
        right=(_right, _right_by_max),
    ),
}
