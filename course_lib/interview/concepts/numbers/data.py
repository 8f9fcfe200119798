"""Numbers of the questions on data parallelism and ZeRO."""

from __future__ import annotations

from typing import Any

from course_lib.formulas import dp
from course_lib.interview.concepts.numbers import about
from course_lib.planner import model
from course_lib.planner.memory import state_bytes
from course_lib.planner.parameters import parameters

FP32 = 4  # bytes per element


def what_is() -> dict[str, Any]:
    """GPT-2 XL on 8 and on 64 GPUs, fp32 gradients."""
    count = parameters(model("gpt2-xl"))
    gradients = count * FP32
    return {
        "n": 8,
        "less": 7,
        "billions": f"{count / 1e9:.2f}",
        "many": 64,
        "batch": 64,
        "own": 64 // 8,
        "states": about(state_bytes(count).total),
        "gradients": about(gradients),
        "sent": about(dp.wire_bytes(gradients, 8)),
        "sent_many": about(dp.wire_bytes(gradients, 64)),
        "limit": about(2 * gradients),
    }
