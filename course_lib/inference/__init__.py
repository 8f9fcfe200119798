"""Inference: one model answers requests, on one rank or on many, with the same tokens.

==========  ===================================================================
scheduler   requests, and which of them take part in the next forward (continuous batching)
cache       keys and values of earlier tokens
sampling    greedy and sampled tokens, the same on every rank of a model
replica     the loop; data, tensor and expert parallelism
pipeline    stages, and groups of requests that alternate
context     a prompt read by all ranks, a cache in shards
formulas    bytes sent and stored: course_lib.formulas.inference
==========  ===================================================================

::

    model = tp.parallelize(build_model(config), mesh.tp)
    scheduler = Scheduler(make_requests(prompts, max_new_tokens=32), slots=8)
    tokens = serve(Replica(model, mesh, slots=8), scheduler).tokens  # by request, on every rank
"""

from typing import TYPE_CHECKING

from course_lib.aliases import aliases
from course_lib.formulas import inference as formulas
from course_lib.formulas.inference import (
    busy_share,
    cache_bytes,
    counts,
    decode_wire_bytes,
    even_ep_wire_bytes,
    moved_cache_wire_bytes,
    pp_wire_bytes,
    prefill_wire_bytes,
    sampling_wire_bytes,
    tp_wire_bytes,
)
from course_lib.inference.cache import Cache
from course_lib.inference.context import ContextReplica
from course_lib.inference.pipeline import Stage, cut, serve_pipeline
from course_lib.inference.replica import Replica, Served, serve, share
from course_lib.inference.sampling import Sampling, choose, chooser
from course_lib.inference.scheduler import Request, Scheduler, StaticScheduler, Work, make_requests

if not TYPE_CHECKING:  # mypy would take every name for an alias
    __getattr__ = aliases(__name__)
