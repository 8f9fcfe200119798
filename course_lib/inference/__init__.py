"""Inference: one model answers requests, on one rank or on many, with the same tokens.

==========  ===================================================================
scheduler   requests, and which of them take part in the next forward (continuous batching)
cache       keys and values of earlier tokens
sampling    greedy and sampled tokens, the same on every rank of a model
replica     the loop; data, tensor and expert parallelism
pipeline    stages, and groups of requests that alternate
context     a prompt read by all ranks, a cache in shards
formulas    bytes sent
==========  ===================================================================

::

    model = tp.parallelize(build_model(config), mesh.tp)
    scheduler = Scheduler(make_requests(prompts, max_new_tokens=32), slots=8)
    tokens = serve(Replica(model, mesh, slots=8), scheduler).tokens  # by request, on every rank
"""

from course_lib.inference.cache import Cache, cache_bytes
from course_lib.inference.context import (
    ContextReplica,
    decode_bytes,
    moved_cache_bytes,
    prefill_bytes,
)
from course_lib.inference.formulas import counts, even_expert_bytes, expert_bytes, tensor_bytes
from course_lib.inference.pipeline import Stage, busy_share, cut, pipeline_bytes, serve_pipeline
from course_lib.inference.replica import Replica, Served, generate, serve, share
from course_lib.inference.sampling import Chooser, Sampling, choose, chooser, sampling_bytes
from course_lib.inference.scheduler import Request, Scheduler, StaticScheduler, Work, make_requests

__all__ = [
    "Cache",
    "Chooser",
    "ContextReplica",
    "Replica",
    "Request",
    "Sampling",
    "Scheduler",
    "Served",
    "Stage",
    "StaticScheduler",
    "Work",
    "busy_share",
    "cache_bytes",
    "choose",
    "chooser",
    "counts",
    "cut",
    "decode_bytes",
    "even_expert_bytes",
    "expert_bytes",
    "generate",
    "make_requests",
    "moved_cache_bytes",
    "pipeline_bytes",
    "prefill_bytes",
    "sampling_bytes",
    "serve",
    "serve_pipeline",
    "share",
    "tensor_bytes",
]
