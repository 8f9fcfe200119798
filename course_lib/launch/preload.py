"""The modules that the fork server imports once for all ranks.

Without torch's parallel modules in the list, the server would start one second earlier, but the
first DDP, FSDP or DTensor of *every* rank would take two seconds.
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
    "course_lib.grading.runner_placed",  # a check starts ranks many times
    "course_lib.launch.rank",
)


def preload() -> list[str]:
    """Import :data:`MODULES`; return the names of the modules that raised an error.

    A rank that imports such a module itself reports the error.
    """
    missing = []
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception:  # the ranks must start even if a lesson file is unfinished
            missing.append(name)
    gc.collect()
    gc.freeze()  # the collector does not write to these pages, so the ranks share them
    return missing
