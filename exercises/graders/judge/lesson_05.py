"""Lesson 05, tensor parallelism: what the exercises give, and what they expect."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.grading.draw import Draw
from course_lib.grading.graders.by_hand import by_hand
from course_lib.grading.graders.runner import lesson_05 as runner
from course_lib.grading.placed import REPLICATED, Placed, bytes_of, sharded
from course_lib.grading.ranked import OnRanks
from course_lib.grading.runner import Observed
from course_lib.grading.trials import Given, Mistake, Trial
from course_lib.model import ModelConfig
from course_lib.model.layers import MLP

# --- 05-2 ----------------------------------------------------------------------------------------


def _linear(trial: Trial, draw: Draw) -> dict[str, Tensor]:
    """On three ranks one token; in the second call one feature per rank, one output, no bias."""
    alone, least = trial.n == 3, trial.n == 3 and draw.call
    rows = 1 if alone else draw.size(2, 5)
    features, out = (1 if least else draw.size(2, most) for most in (4, 7))
    features *= trial.n
    return {
        "h_TFt": draw.normal(rows, features),
        "weight_DFt": draw.normal(out, features),
        "bias_D": torch.zeros(out, dtype=draw.dtype) if least else draw.normal(out),
    }


def _parts(given: Given) -> list[Tensor]:
    return [F.linear(h, w) for h, w in zip(given["h_TFt"], given["weight_DFt"], strict=True)]


def _right(given: Given) -> Tensor:
    return given.expected["outputs"][0]


def _bias(given: Given) -> Tensor:
    return given["bias_D"][0]


BIAS = Placed(
    id="05-2",
    title="where the bias goes",
    names=("row_linear",),
    axes=("outputs", "gradients"),
    whole=_linear,
    inputs={"h_TFt": sharded(1), "weight_DFt": sharded(1), "bias_D": REPLICATED},
    reference=F.linear,
    mistakes=tuple(
        Mistake(message, {name: results})
        for name, message, results in (
            (
                "outputs",
                "every rank added the bias, so the sum contains it n times: add it after the sum",
                lambda given: _right(given) + (given.n - 1) * _bias(given),
            ),
            ("outputs", "the bias is missing", lambda given: _right(given) - _bias(given)),
            ("outputs", "the ranks' parts are not summed, and the bias is missing", _parts),
            (
                "outputs",
                "the ranks' parts are not summed: use comm.reduce_from",
                lambda given: [part + _bias(given) for part in _parts(given)],
            ),
            ("outputs", "the parts were summed twice", lambda given: given.n * _right(given)),
            (
                "gradient of bias_D",
                "the bias was divided by the number of ranks before it was added: every rank "
                "stores the whole bias and needs its whole gradient",
                lambda given: given.expected["gradient of bias_D"][0] / given.n,
            ),
        )
    ),
    calls=lambda given, rank: [("all_reduce", bytes_of(_right(given)))],
    calls_why="One all-reduce of y is enough",
    refused=("course_lib.tp.layers:RowLinear.forward",),
)


# --- 05-3 ----------------------------------------------------------------------------------------


def _for_operators(trial: Trial, draw: Draw) -> list[dict[str, Tensor]]:
    shape = draw.shape()
    x_f, dy_g = draw.tensor(*shape), draw.upstream(*shape)
    return [
        {
            "x of f": x_f,
            "dy of f": draw.upstream(*shape),
            "x of g": draw.tensor(*shape),
            "dy of g": dy_g,
        }
        for _ in range(trial.n)
    ]


def _summed(name: str) -> Any:
    return lambda given: torch.stack(given[name]).sum(0)


def _averaged(name: str) -> Any:
    return lambda given: torch.stack(given[name]).mean(0)


OWN = "every rank still has its own part: sum the parts over the ranks"
AVERAGE = "this is the average over the ranks: sum, do not divide"
TWICE = "this is summed over ranks that all have the same values: pass it on unchanged"
_SUMS = {"gradients of f": "dy of f", "outputs of g": "x of g"}
_SAME = {"outputs of f": "x of f", "gradients of g": "dy of g"}


def _other_axis(given: Given, ranks: list[Observed], name: str) -> str:
    if any(call.ranks != given.group for rank in ranks for call in rank.calls):
        return (
            "f.apply was called with another axis before the backward, and this axis was used: "
            "store the axis in ctx, not on the class"
        )
    return ""


OPERATORS = OnRanks(
    id="05-3",
    title="the pair of operators",
    names=("Copy", "Reduce"),
    axes=("outputs", "gradients"),
    act=runner.operators,
    draw=_for_operators,
    expected=lambda given: (
        {name: _summed(source)(given) for name, source in _SUMS.items()}
        | {name: given[source] for name, source in _SAME.items()}
    ),
    mistakes=(
        *(Mistake(OWN, {name: lambda given, s=s: given[s]}) for name, s in _SUMS.items()),
        *(Mistake(AVERAGE, {name: _averaged(s)}) for name, s in _SUMS.items()),
        *(Mistake(TWICE, {name: _summed(s)}) for name, s in _SAME.items()),
    ),
    calls=lambda given, rank: [("all_reduce", bytes_of(given["x of f"][0]))] * 2,
    explain=_other_axis,
    calls_why="f makes one all-reduce in backward, g one in forward, each as large as x",
    refused=("course_lib.comm.operators:_Pair.forward",),
)


# --- 05-4 ----------------------------------------------------------------------------------------

DIMS = {"weight_in": sharded(0), "bias_in": sharded(0), "weight_out": sharded(1),
        "bias_out": REPLICATED}  # fmt: skip


def _mlp(trial: Trial, draw: Draw) -> Any:
    least = trial.n == 3  # one sequence of one token, one feature per rank
    hidden, inner = draw.size(3, 6), trial.n * (1 if least else draw.size(2, 4))
    module = MLP(ModelConfig(family="gpt", hidden=hidden, heads=1, kv_heads=1, ffn=inner))
    module = module.to(trial.dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(draw.normal(*p.shape, scale=0.5))
        module.fc_in.bias += 3 * least  # GELU of one negative number would be too small to compare
    shape = (1, 1, hidden) if least else (2, draw.size(2, 4), hidden)
    given = {"mlp": module, "x": draw.normal(*shape), "dy": draw.upstream(*shape)}
    return [dict(given) for _ in range(trial.n)], given


def _by_name(module: nn.Module) -> dict[str, Tensor]:
    return dict(zip(runner.PARAMETERS, module.parameters(), strict=True))


def _trained(given: Given) -> dict[str, Any]:
    mlp, x, dy = given.whole["mlp"], given.whole["x"].clone().requires_grad_(), given.whole["dy"]
    mlp = deepcopy(mlp)
    y = mlp(x)
    y.backward(dy)
    assert x.grad is not None
    found = {"outputs": y.detach(), "gradient of x": x.grad, runner.EXTRA: 0}
    for name, p in _by_name(mlp).items():
        assert p.grad is not None
        found[f"gradient of {name}"] = DIMS[name].expected(p.grad.clone(), given.n)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=runner.RATE)
    for _ in range(runner.STEPS):
        optimizer.zero_grad()
        mlp(x.detach()).backward(dy)
        optimizer.step()
    for name, p in _by_name(mlp).items():
        key = f"weight {name} after {runner.STEPS} steps"
        found[key] = DIMS[name].expected(p.detach(), given.n)
    return found


def _mlp_output(given: Given) -> Tensor:
    return given.expected["outputs"][0]


def _mlp_parts(given: Given) -> list[Tensor]:
    mlp = given.whole["mlp"]
    h = F.gelu(mlp.fc_in(given.whole["x"]))
    shards = zip(h.chunk(given.n, -1), mlp.fc_out.weight.chunk(given.n, 1), strict=True)
    return [F.linear(a, b).detach() for a, b in shards]


def _dx_parts(given: Given) -> list[Tensor]:
    found = []
    for rank in range(given.n):
        mlp, x = deepcopy(given.whole["mlp"]), given.whole["x"].clone().requires_grad_()
        h = F.gelu(mlp.fc_in(x)).chunk(given.n, -1)[rank]
        F.linear(h, mlp.fc_out.weight.chunk(given.n, 1)[rank]).backward(given.whole["dy"])
        found.append(x.grad)
    return found


def _outer_bias(given: Given) -> Tensor:
    return given.whole["mlp"].fc_out.bias.detach()


def _without_gelu(given: Given) -> Tensor:
    mlp = given.whole["mlp"]
    return mlp.fc_out(mlp.fc_in(given.whole["x"])).detach()


MLP_PAIR = OnRanks(
    id="05-4",
    title="the MLP on ranks",
    names=("ParallelMLP",),
    axes=("outputs", "gradients", "weights"),
    act=runner.mlp,
    draw=_mlp,
    expected=_trained,
    terms=256,
    mistakes=(
        *(
            Mistake(message, {"outputs": results})
            for message, results in (
                (
                    "every rank added the outer bias, so the sum contains it n times: add it after "
                    "the sum",
                    lambda given: _mlp_output(given) + (given.n - 1) * _outer_bias(given),
                ),
                (
                    "the outer bias is missing",
                    lambda given: _mlp_output(given) - _outer_bias(given),
                ),
                (
                    "the ranks' parts are not summed: use comm.reduce_from",
                    lambda given: [each + _outer_bias(given) for each in _mlp_parts(given)],
                ),
                ("the ranks' parts are not summed, and the outer bias is missing", _mlp_parts),
                ("there is no GELU between the two linears", _without_gelu),
            )
        ),
        Mistake(
            "each rank has only the part of dx that went through its own features: x enters with "
            "comm.copy_to, whose backward sums them",
            {"gradient of x": _dx_parts},
        ),
    ),
    calls=lambda given, rank: [("all_reduce", bytes_of(given.whole["x"]))] * (2 + 2 * runner.STEPS),
    calls_why="One all-reduce in forward and one in backward, each as large as x",
    refused=(
        "course_lib.tp.layers:ColumnLinear.forward",
        "course_lib.tp.layers:RowLinear.forward",
        "torch.distributed.tensor.parallel.api:parallelize_module",
    ),
)


# --- 05-5 ----------------------------------------------------------------------------------------


def _weights(trial: Trial, draw: Draw) -> Any:
    heads, head = trial.n * draw.size(1, 2), draw.size(1, 3) * 2 + draw.call
    hidden, batch, seq = heads * head, 1 + draw.call, draw.size(3, 5)
    given = {
        "x": draw.normal(batch, seq, hidden),
        "weights": {name: draw.normal(hidden, hidden, scale=hidden**-0.5) for name in "qkvo"},
        "head_dim": head,
        "dy": draw.upstream(batch, seq, hidden),
    }
    return [dict(given) for _ in range(trial.n)], given


def _attend(x: Tensor, w: list[Tensor], head_dim: int, *, causal: bool = True) -> Tensor:
    """(B, S, features of the heads whose rows of q, k and v are ``w``)."""
    q_BHSK, k_BHSK, v_BHSK = (
        F.linear(x, each).unflatten(-1, (-1, head_dim)).transpose(1, 2) for each in w
    )
    y_BHSK = F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, is_causal=causal)
    return y_BHSK.transpose(1, 2).flatten(-2)


def _shards(given: Given, rank: int) -> dict[str, Tensor]:
    return {
        name: w.chunk(given.n, 1 if name == "o" else 0)[rank]
        for name, w in given.whole["weights"].items()
    }


def _step(given: Given) -> dict[str, Any]:
    """The expected results, from the single process."""
    x = given.whole["x"].clone().requires_grad_()
    w = {name: each.clone().requires_grad_() for name, each in given.whole["weights"].items()}
    y = F.linear(_attend(x, [w[name] for name in "qkv"], given.whole["head_dim"]), w["o"])
    y.backward(given.whole["dy"])
    return {"outputs": y.detach(), "gradient of x": x.grad} | {
        f"gradient of {name}": list(each.grad.chunk(given.n, 1 if name == "o" else 0))
        for name, each in w.items()
    }


def _simulated(given: Given, key: str, *, head_dim: int = 0, causal: bool = True,
               strided: bool = False) -> list[Tensor]:  # fmt: skip
    """The result ``key`` of each rank, before any sum, with a mistake."""
    found = []
    for rank in range(given.n):
        w = _shards(given, rank)
        if strided:
            w |= {name: given.whole["weights"][name][rank :: given.n] for name in "qkv"}
        x = given.whole["x"].clone().requires_grad_()
        own = [w[name] for name in "qkv"]
        part = F.linear(_attend(x, own, head_dim or given.whole["head_dim"], causal=causal), w["o"])
        part.backward(given.whole["dy"])
        assert x.grad is not None
        found.append({"outputs": part.detach(), "gradient of x": x.grad}[key])
    return found


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


ATTENTION = OnRanks(
    id="05-5",
    title="attention by heads in raw PyTorch",
    names=("attention_step",),
    axes=("outputs", "gradients"),
    trials=(Trial(2), Trial(4, dtype=torch.float64, strided=True), Trial(3), Trial(1)),
    act=runner.attention,
    draw=_weights,
    expected=_step,
    terms=64,
    mistakes=(
        Mistake(
            "each rank returns only what its own heads add to y: sum it over the ranks",
            {"outputs": lambda given: _simulated(given, "outputs")},
        ),
        Mistake(
            "the attention is not causal: a position sees later positions",
            {"outputs": lambda given: _sum(_simulated(given, "outputs", causal=False))},
        ),
        Mistake(
            "all features of a rank were taken for one head: a head has head_dim features",
            {
                "outputs": lambda given: _sum(
                    _simulated(given, "outputs", head_dim=given.whole["x"].shape[-1] // given.n)
                )
            },
        ),
        Mistake(
            "each rank took every n-th row of q, k and v: the rows of a head are neighbors, so a "
            "shard is contiguous",
            {"outputs": lambda given: _sum(_simulated(given, "outputs", strided=True))},
        ),
        Mistake(
            "each rank has the gradient of x through its own heads alone: sum it over the ranks",
            {"gradient of x": lambda given: _simulated(given, "gradient of x")},
        ),
        Mistake(
            "dx is averaged over the ranks: sum the parts",
            {"gradient of x": lambda given: given.expected["gradient of x"][0] / given.n},
        ),
        *(
            Mistake(
                "the gradients of the weights are summed over ranks that compute different heads: "
                "each rank's gradient is complete",
                {key: lambda given, key=key: _sum(given.expected[key])},
            )
            for key in (f"gradient of {name}" for name in "qkvo")
        ),
    ),
    calls=lambda given, rank: [("all_reduce", bytes_of(given.whole["x"]))] * 2,
    calls_why="Two all-reduces are enough: y, and dx once for q, k and v together",
    refused=("course_lib.comm.transfer:issue", "course_lib.model.layers:Attention.forward"),
)

EXERCISES = (by_hand("05-1"), BIAS, OPERATORS, MLP_PAIR, ATTENTION)
