"""What only an NVIDIA card can show: `make test-gpu`. Without one every test here is skipped.

One card is enough for the kernels, the meters and a world of one rank on nccl; techniques run on
as many ranks as there are cards. The last test tries the known ways to put several ranks on one
card, and says which of them work here: the README's table is filled in from what it prints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from equality import assert_equal
from torch import nn

from course_lib import comm, dp, sp, tp, zero
from course_lib.cp import blockwise
from course_lib.launch import RankError, run
from course_lib.mesh import make_mesh
from course_lib.model import Decoder, build_model, tiny_config
from course_lib.trace.memory import PeakLiveBytes

CARDS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(CARDS == 0, reason="needs an NVIDIA card")
RANKS = 1 << (CARDS.bit_length() - 1) if CARDS else 1  # a power of two divides every size below
CONFIG = tiny_config(dtype=torch.float64, max_seq_len=16 * RANKS)
STEPS, ROWS = 3, 2 * RANKS


def batch_of(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(CONFIG.vocab, (ROWS, CONFIG.max_seq_len + 1), generator=generator)
    return ids[:, :-1].to(device), ids[:, 1:].to(device)


def model_on(device: torch.device) -> Decoder:
    return build_model(CONFIG, seed=0, device=device)


def adam(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone().cpu() for name, p in model.named_parameters()}


def serial_weights() -> dict[str, torch.Tensor]:
    device = torch.device("cuda")
    model = model_on(device)
    optimizer = adam(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        total, count = model.loss_sum(*batch_of(step, device))
        (total / count).backward()
        optimizer.step()
    return weights_of(model)


def data_parallel(stage: int) -> dict[str, torch.Tensor]:
    mesh = make_mesh()
    model = model_on(mesh.device)
    if stage:
        kinds = {
            1: lambda: zero.Zero1(model.parameters(), mesh.dp, adam),
            2: lambda: zero.Zero2(model.parameters(), mesh.dp, adam),
            3: lambda: zero.Zero3(model, list(model.blocks), mesh.dp, adam),
        }
        sync = optimizer = kinds[stage]()
    else:
        sync, optimizer = dp.Overlapped(model.parameters(), mesh.dp), adam(model.parameters())
    for step in range(STEPS):
        tokens, targets = batch_of(step, mesh.device)
        mine = [(part.chunk(mesh.dp.size)[mesh.dp.rank]) for part in (tokens, targets)]
        dp.train_step(model.loss_sum, [(mine[0], mine[1])], sync, optimizer)
    if isinstance(sync, zero.Zero3):
        with sync.gathered():
            return weights_of(model)
    return weights_of(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_data_parallel_and_zero_on_nccl_equal_one_process(stage):
    for weights in run(data_parallel, stage, n=RANKS, device="cuda"):
        assert_equal(weights, serial_weights(), 1e-8, "weights")


def losses_of(kind: str) -> list[float]:
    mesh = make_mesh(tp=RANKS)
    device = mesh.device
    region = {"tp": tp.REGION, "sp": sp.REGION}[kind]
    model = tp.parallelize(model_on(device), mesh.tp, region)
    return [float(sum_and_count(model, *batch_of(step, device))) for step in range(STEPS)]


def sum_and_count(model: Decoder, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    total, count = model.loss_sum(tokens, targets)
    return (total / count).detach()


@pytest.mark.parametrize("kind", ["tp", "sp"])
def test_tensor_and_sequence_parallel_losses_on_nccl(kind):
    device = torch.device("cuda")
    model = model_on(device)
    wanted = [float(sum_and_count(model, *batch_of(step, device))) for step in range(STEPS)]
    for losses in run(losses_of, kind, n=RANKS, device="cuda"):
        assert losses == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
def test_the_flash_kernel_of_the_card_gives_what_the_plain_one_gives(causal, heads, kv_heads):
    generator = torch.Generator().manual_seed(0)

    def draw(h: int) -> torch.Tensor:
        return torch.randn(2, 256, h, 64, generator=generator).to("cuda", torch.bfloat16)

    q, k, v, dout = draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)
    assert blockwise.kernel_for(q) is blockwise.FLASH_CUDA
    results = []
    for kernel in (blockwise.FLASH_CUDA, blockwise.PLAIN):
        out, lse = kernel.forward(q, k, v, causal)
        results.append((out, lse, *kernel.backward(dout, q, k, v, out, lse, causal)))
    for got, wanted in zip(*results, strict=True):
        error = (got.float() - wanted.float()).abs().max() / wanted.float().abs().max()
        assert float(error) < 2e-2  # bfloat16 has 8 bits


@contextmanager
def allocator_peak(device: torch.device | str) -> Iterator[list[int]]:
    """The peak bytes of the CUDA allocator in the body, above those before it, as one number."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, found = torch.cuda.memory_allocated(device), []
    yield found
    torch.cuda.synchronize(device)
    found.append(torch.cuda.max_memory_allocated(device) - before)


def peaks(layout_rows: int) -> tuple[int, int]:
    """(allocator, live tensors) of one forward and backward of the model."""
    model = model_on(make_mesh().device)
    tokens, targets = batch_of(0, make_mesh().device)
    sum_and_count(model, tokens, targets)  # the libraries' own work space is there before
    with allocator_peak(tokens.device) as allocator, PeakLiveBytes() as live:
        model.loss_sum(tokens[:layout_rows], targets[:layout_rows])[0].backward()
    return allocator[0], live.peak


def test_live_bytes_are_those_of_the_allocator():
    with allocator_peak("cuda") as allocator, PeakLiveBytes() as live:
        x = torch.ones(1 << 20, device="cuda")
        y = x + 1
        del x, y
    assert live.peak == 2 * (4 << 20)
    assert allocator == [live.peak]


def test_the_allocator_agrees_with_the_live_bytes():
    (allocator, live), *_ = run(peaks, 2, n=1, device="cuda")
    assert live <= allocator * 1.001
    assert allocator <= 1.3 * live, "more than rounding and scratch memory"


def collectives() -> dict[str, bool]:
    """Every operation of comm, on nccl, against its definition."""
    mesh = make_mesh()
    axis = mesh.dp
    mine = torch.arange(4.0 * axis.size, device=mesh.device) + axis.rank
    every = torch.stack([mine - axis.rank + other for other in range(axis.size)])
    part = slice(4 * axis.rank, 4 * axis.rank + 4)
    return {
        "all_reduce": torch.equal(comm.all_reduce(mine, axis), every.sum(0)),
        "all_gather": torch.equal(comm.all_gather(mine, axis), every.flatten()),
        "reduce_scatter": torch.equal(comm.reduce_scatter(mine, axis), every.sum(0)[part]),
        "all_to_all": torch.equal(comm.all_to_all(mine, axis), every[:, part].flatten()),
        "broadcast": torch.equal(comm.broadcast(mine, axis), every[0]),
    }


def test_collectives_on_nccl():
    for seen in run(collectives, n=RANKS, device="cuda"):
        assert all(seen.values()), seen


# --- several ranks on one card -----------------------------------------------------------------

ROUTES = {
    "a host id of its own for each rank": {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NET": "Socket",
    },
    "NCCL_MULTI_RANK_GPU_ENABLE": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"},
}


def sum_on_one_card(route: str) -> float:
    """One nccl group of all ranks on card 0. Called with init=False: nothing is set up yet."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.update(ROUTES[route])
    if "host id" in route:
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    x = torch.full((1 << 16,), float(rank), device="cuda")
    dist.all_reduce(x)
    peer = rank ^ 1
    got = torch.empty(4, device="cuda")
    ops = [dist.P2POp(dist.isend, x[:4].clone(), peer), dist.P2POp(dist.irecv, got, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    torch.cuda.synchronize()
    return float(x[0] + got[0])


@pytest.mark.parametrize("route", ROUTES)
def test_two_ranks_on_one_card(route):
    try:
        sums = run(sum_on_one_card, route, n=2, init=False, timeout=60)
    except RankError as error:
        pytest.skip(f"{route}: does not work here ({str(error).splitlines()[0]})")
    assert list(sums) == [2.0, 2.0]
