"""What the fork server imports once, so that no rank has to.

Without torch's parallel modules in the list the server starts a second earlier, but the first
DDP, FSDP or DTensor of *every* rank then takes two seconds.
"""

from __future__ import annotations

import gc
import importlib

MODULES = (
    "numpy",
    "cloudpickle",
    "torch",
    "torch.optim",
    "torch.distributed",
    "torch.distributed.algorithms.join",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
    "course_lib.mesh",
    "course_lib.comm",
    "course_lib.model",
    "course_lib.data",
    "course_lib.recompute",
    "course_lib.dp",
    "course_lib.zero",
    "course_lib.tp",
    "course_lib.sp",
    "course_lib.cp",
    "course_lib.ep",
    "course_lib.pp",
    "course_lib.compose",
    "course_lib.checkpoint",
    "course_lib.inference",
    "course_lib.grading.ranked",  # a check starts ranks again and again
    "course_lib.launch.rank",
)


def preload() -> list[str]:
    """Import :data:`MODULES`; return those that could not be. A rank that needs one says why."""
    missing = []
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception:  # a half-written lesson file must not keep the ranks from starting
            missing.append(name)
    gc.collect()
    gc.freeze()  # the collector then leaves these pages shared between the ranks
    return missing
