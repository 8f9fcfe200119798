"""What a learner's function uses of torch and of the course is the rank's own, never a copy."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from attack import DEADLINE
from torch.autograd.function import once_differentiable

from course_lib import comm
from course_lib.grading import check
from course_lib.grading.arena import ranks
from course_lib.launch import run

ROOT = Path(__file__).parents[2]


class Double(torch.autograd.Function):
    """Twice x; its backward cannot be differentiated."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return 2 * gradient


def differentiated():
    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(Double.apply(x).sum(), x, create_graph=True)
    own = vars(sys.modules["torch.autograd.function"])
    return gradient.tolist(), Double.backward.__globals__ is own, Double.backward.__module__


def test_a_wrapper_of_torch_has_the_globals_of_torch():
    assert list(run(differentiated, n=2)) == [([2.0, 2.0, 2.0], True, __name__)] * 2


def test_a_lambda_of_the_course_has_the_globals_of_its_module():
    share = ranks._share(torch.ones(4))

    @torch.no_grad()
    def work():
        own = vars(sys.modules["course_lib.grading.arena.ranks"])
        return torch.is_grad_enabled(), share.__globals__ is own

    assert list(run(work, n=2)) == [(False, True)] * 2


def solution(ex: str) -> str:
    """Return the source of the answer cell that is committed as the solution of ``ex``."""
    (path,) = (ROOT / "solutions").glob(f"{ex.partition('-')[0]}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return next("".join(cell["source"]) for cell in cells if cell.get("id") == f"{ex}-answer")


@pytest.mark.parametrize(("ex", "names"), [("05-3", ("Copy", "Reduce")), ("06-4", ("VocabLoss",))])
def test_a_solution_may_be_once_differentiable(ex, names):
    plain = "    @staticmethod\n    def backward"
    source = solution(ex)
    assert plain in source
    decorated = source.replace(
        plain, "    @staticmethod\n    @once_differentiable\n    def backward"
    )
    space = {"__name__": "__main__", "torch": torch, "comm": comm}
    exec("from torch.autograd.function import once_differentiable\n" + decorated, space)
    verdict = check(ex, *(space[name] for name in names), seed=3, deadline=DEADLINE)
    assert verdict.ok, verdict.message
