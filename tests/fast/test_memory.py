"""The memory meters, held to hand counts and to torch's own MemTracker. Float32: 4 bytes."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from course_lib.trace import (
    PeakLiveBytes,
    SavedActivations,
    StateBytes,
    state_bytes,
)

ROWS, WIDTH, HIDDEN = 4, 8, 16
WEIGHTS = 4 * (WIDTH * HIDDEN + HIDDEN + HIDDEN * WIDTH + WIDTH)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


# --- state_bytes ----------------------------------------------------------------------------


def test_state_grows_with_backward_and_optimizer():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    assert state_bytes(model, optimizer) == StateBytes(WEIGHTS, 0, 0)
    model(torch.randn(ROWS, WIDTH)).sum().backward()
    assert state_bytes(model, optimizer) == StateBytes(WEIGHTS, WEIGHTS, 0)
    optimizer.step()
    steps = 4 * len(list(model.parameters()))  # a float32 step counter for each parameter
    state = state_bytes(model, optimizer)
    assert state == StateBytes(WEIGHTS, WEIGHTS, 2 * WEIGHTS + steps)
    assert state.total == 4 * WEIGHTS + steps
    optimizer.zero_grad()
    assert state_bytes(model).gradients == 0


def test_tied_weights_count_once():
    model = nn.Module()
    model.embedding = nn.Embedding(10, 4)
    model.head = nn.Linear(4, 10, bias=False)
    assert state_bytes(model).parameters == 2 * 160
    model.head.weight = model.embedding.weight
    assert state_bytes(model).parameters == 160
    model.head.weight = nn.Parameter(model.embedding.weight.detach())  # two objects, one storage
    assert state_bytes(model).parameters == 160


def test_views_of_a_flat_buffer_count_it_once_with_its_padding():
    model = mlp()
    flat, gradients = torch.zeros(WEIGHTS // 4 + 7), torch.zeros(WEIGHTS // 4 + 7)
    start = 0
    for parameter in model.parameters():
        end = start + parameter.numel()
        parameter.data = flat[start:end].view_as(parameter)
        parameter.grad = gradients[start:end].view_as(parameter)
        start = end
    assert state_bytes(model) == StateBytes(WEIGHTS + 28, WEIGHTS + 28, 0)


def test_master_weights_of_the_optimizer_are_optimizer_state():
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    master = nn.Parameter(model.weight.detach().float())
    optimizer = torch.optim.SGD([master], lr=0.1, momentum=0.9)
    master.grad = torch.ones_like(master)
    optimizer.step()
    assert state_bytes(model, optimizer) == StateBytes(32, 64, 64 + 64)


def test_a_pipeline_rank_passes_its_stages():
    first, second = mlp(), mlp()
    assert state_bytes([first, second]).parameters == 2 * WEIGHTS
    assert state_bytes([first, first]).parameters == WEIGHTS
    assert state_bytes([torch.zeros(3), first]).parameters == WEIGHTS + 12


def test_buffers_are_no_parameters():
    assert state_bytes(nn.BatchNorm1d(5)).parameters == 2 * 20


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"list has no \.param_groups"):
        state_bytes(mlp(), [])


# --- saved activations ----------------------------------------------------------------------

X, H = 4 * ROWS * WIDTH, 4 * ROWS * HIDDEN


def test_saved_activations_of_linear_gelu_linear():
    """Saved are x (for the first weight), the input of gelu, and its output."""
    model, x = mlp(), torch.randn(ROWS, WIDTH)
    with SavedActivations(model) as saved:
        loss = model(x).sum()
    assert (saved.peak, saved.now) == (X + 2 * H, X + 2 * H)
    loss.backward()
    assert (saved.peak, saved.now) == (X + 2 * H, 0)


def test_parameters_count_unless_the_model_is_given():
    model, x = mlp(), torch.randn(ROWS, WIDTH)
    with SavedActivations() as saved:
        model(x.requires_grad_()).sum()  # both weights are saved: each input has a gradient
    assert saved.peak == X + 2 * H + 2 * 4 * WIDTH * HIDDEN


def test_a_storage_saved_twice_counts_once():
    x = torch.randn(100, requires_grad=True)
    with SavedActivations() as saved:
        y = x.exp()  # saves its output
        loss = (y * y).sum() + (y[:50] * 2.0).sin().sum()  # saves y twice, and 50 numbers more
    assert saved.peak == 400 + 200
    loss.backward()
    assert saved.now == 0


def test_a_view_counts_the_whole_storage_that_it_keeps_alive():
    x = torch.randn(100, requires_grad=True)
    with SavedActivations() as saved:
        x[:10].sin()
    assert saved.peak == 400


def test_buffers_do_not_count():
    class Rotate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cos", torch.rand(50))

        def forward(self, x):
            return x * self.cos

    model, x = Rotate(), torch.randn(50, requires_grad=True)
    with SavedActivations(model) as saved:
        model(x)
    assert saved.peak == 0


def test_backward_releases_layer_by_layer():
    model, x = mlp(), torch.randn(ROWS, WIDTH)
    seen = []
    with SavedActivations(model) as saved:
        hidden = model[0](x)
        hidden.register_hook(lambda grad: seen.append(saved.now))
        model[2](model[1](hidden)).sum().backward()
    # When the gradient reaches the first linear, gelu and the second linear are done.
    assert seen == [X]
    assert saved.now == 0


def test_dropping_the_graph_releases_and_retaining_keeps():
    model, x = mlp(), torch.randn(ROWS, WIDTH)
    with SavedActivations(model) as saved:
        loss = model(x).sum()
    loss.backward(retain_graph=True)
    assert saved.now == X + 2 * H
    del loss
    gc.collect()
    assert saved.now == 0


def test_two_micro_batches_in_flight_are_twice_the_bytes():
    model = mlp()
    with SavedActivations(model) as saved:
        losses = [model(torch.randn(ROWS, WIDTH)).sum() for _ in range(2)]
        assert saved.now == 2 * (X + 2 * H)
        losses[0].backward()
        assert saved.now == X + 2 * H
        losses[1].backward()
    assert (saved.peak, saved.now) == (2 * (X + 2 * H), 0)


def test_the_meter_changes_no_gradient():
    model, x = mlp(), torch.randn(ROWS, WIDTH)
    twin = copy.deepcopy(model)
    with SavedActivations(model):
        model(x).pow(2).sum().backward()
    twin(x).pow(2).sum().backward()
    for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, plain.grad)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_keeps_only_the_input(use_reentrant):
    model, x = mlp(), torch.randn(ROWS, WIDTH, requires_grad=True)
    with SavedActivations(model) as saved:
        loss = checkpoint(model, x, use_reentrant=use_reentrant).sum()
        assert saved.now == X
    loss.backward()
    assert saved.now == 0


def test_no_gradient_nothing_saved():
    with SavedActivations() as saved, torch.no_grad():
        mlp()(torch.randn(ROWS, WIDTH))
    assert saved.peak == 0


# --- peak live bytes ------------------------------------------------------------------------


def test_live_bytes_of_a_chain_by_hand():
    x = torch.zeros(100)  # made before: not counted
    with PeakLiveBytes() as live:
        a = x + 1  # 400
        b = a * 2  # 800
        del a  # 400
        c = torch.cat([b, b])  # 1200
        assert live.now == 1200
        del b
        assert live.now == 800
        del c
    assert (live.peak, live.now) == (1200, 0)
    sizes = [size for _, size in live.timeline]
    assert sizes == [0, 400, 800, 400, 1200, 800, 0]
    times = [when for when, _ in live.timeline]
    assert times == sorted(times)


def test_views_and_writing_in_place_add_nothing():
    x = torch.zeros(100)
    with PeakLiveBytes() as live:
        x.add_(1).view(10, 10).t()[:5].mul_(2)
        x.detach().copy_(x.flip(0))  # flip makes 400
        y = torch.empty(50)
        y.normal_().relu_()
        half = y[:25]
        del y
        assert live.now == 200  # the view keeps all of it
        del half
    assert (live.peak, live.now) == (400, 0)


def test_every_way_to_make_a_tensor_counts():
    with PeakLiveBytes() as live:
        kept = [torch.tensor([1.0, 2.0]), torch.arange(3), torch.ones(5).double(), nn.Linear(2, 2)]
        assert live.now == 8 + 24 + 40 + 24
    assert live.peak >= live.now
    kept.clear()
    assert live.now == 0


def test_what_outlives_the_context_is_counted_until_it_dies():
    with PeakLiveBytes() as live:
        kept = torch.ones(100)
    later = torch.ones(1000)
    assert (live.peak, live.now) == (400, 400)
    del kept, later
    assert (live.peak, live.now) == (400, 0)


def test_gathered_without_gradient_is_seen():
    """What saved-tensor hooks are blind to: a big temporary under no_grad."""
    x = torch.zeros(100)
    with SavedActivations() as saved, PeakLiveBytes() as live, torch.no_grad():
        torch.cat([x] * 4).sum()
    assert saved.peak == 0
    assert live.peak == 4 * 400 + 4


def test_a_storage_freed_by_resizing_is_free():
    with PeakLiveBytes() as live:
        full = torch.ones(1000)
        full.untyped_storage().resize_(0)
        assert live.now == 0
        other = torch.ones(500)
    assert live.peak == 4000
    assert live.now == other.untyped_storage().nbytes() == 2000
    with PeakLiveBytes() as live:
        full = torch.ones(1000)
        full.untyped_storage().resize_(0)
        other = torch.ones(800)
    assert live.peak == max(size for _, size in live.timeline) == 4000
    with PeakLiveBytes() as live:
        small = torch.ones(10)
        small.untyped_storage().resize_(400)
        torch.ones(10)
    assert (live.peak, live.now) == (440, 400)


def test_state_counts_by_what_it_has_grown():
    """Parameters that are gathered before use and freed after lie in storages made long before."""
    flat = torch.zeros(1000)
    weight = nn.Parameter(flat[:10])
    flat.untyped_storage().resize_(400)
    with PeakLiveBytes(weight) as live:
        other = torch.ones(10)
        flat.untyped_storage().resize_(4000)
        flat.fill_(1.0)
        assert live.now == 40 + 3600
        flat.untyped_storage().resize_(400)
        torch.ones(20)
    assert (live.peak, live.now) == (40 + 3600, 40)
    del other, flat, weight
    assert live.now == 0
    sizes = [size for _, size in live.timeline]
    assert sizes == [0, 40, 3640, 40, 120, 40, 0]


def tracked_peak(step) -> int:
    tracker = MemTracker()
    with tracker:
        step()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def test_forward_and_backward_agree_with_mem_tracker():
    model, x = nn.Sequential(mlp(), nn.LayerNorm(WIDTH), mlp()), torch.randn(ROWS, WIDTH)

    def step() -> None:
        model(x).pow(2).sum().backward()
        model.zero_grad()

    with PeakLiveBytes() as live:
        step()
    assert live.now == 0
    assert live.peak == tracked_peak(step) - state_bytes(model).parameters


def test_backward_peak_by_hand():
    """Before the step of the first linear: its input's gradient is not wanted, its own are."""
    x = torch.randn(ROWS, WIDTH)
    weight = torch.randn(WIDTH, HIDDEN, requires_grad=True)
    with PeakLiveBytes() as live:
        loss = (x @ weight).sum()  # H + 4, then the product dies: sum keeps no input
        assert live.now == 4
        loss.backward()
        assert live.now == 4 + weight.grad.untyped_storage().nbytes()


def test_a_whole_step_agrees_with_mem_tracker():
    """MemTracker counts what was there before too, once it is told of it."""
    model, x = mlp(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        model(x).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = state_bytes(model, optimizer).total
    with PeakLiveBytes() as live:
        step()
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert (live.peak, live.now) == (peak - before, 0)


def test_recomputation_lowers_the_live_peak():
    blocks = [mlp() for _ in range(6)]

    def peak(recompute: bool) -> int:
        with PeakLiveBytes() as live:
            x = torch.randn(64, WIDTH)
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            x.sum().backward()
        return live.peak

    assert peak(recompute=True) < 0.6 * peak(recompute=False)


def test_a_meter_can_go_on():
    live = PeakLiveBytes()
    with live:
        first = torch.ones(10)
    with live:
        second = torch.ones(20)
    assert (live.peak, live.now) == (120, 120)
    del first, second
    assert live.now == 0
