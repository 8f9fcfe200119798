"""Inference: one model answers requests, on one rank or on many, with the same tokens.

==========  ===================================================================
book        requests, and who takes part in the next forward (continuous batching)
cache       keys and values of earlier tokens
choice      greedy and drawn tokens, the same on every rank of a model
replica     the loop; data, tensor and expert parallelism
pipeline    stages, and groups of requests that take turns
context     a prompt read by all ranks, a cache held in parts
formulas    bytes sent
==========  ===================================================================

::

    model = tp.parallelize(build_model(config), mesh.tp)
    book = Book(make_requests(prompts, max_new_tokens=32), slots=8)
    tokens = serve(Replica(model, mesh, slots=8), book).tokens  # by request, on every rank
"""

from course_lib.inference.book import Book, Request, StaticBook, Work, make_requests
from course_lib.inference.cache import Cache, cache_bytes
from course_lib.inference.choice import Chooser, Sampling, choice_bytes, choose, chooser
from course_lib.inference.context import (
    ContextReplica,
    decode_bytes,
    moved_cache_bytes,
    prefill_bytes,
)
from course_lib.inference.formulas import counts, even_expert_bytes, expert_bytes, tensor_bytes
from course_lib.inference.pipeline import Stage, busy_share, cut, pipeline_bytes, serve_pipeline
from course_lib.inference.replica import Replica, Served, generate, serve, share

__all__ = [
    "Book",
    "Cache",
    "Chooser",
    "ContextReplica",
    "Replica",
    "Request",
    "Sampling",
    "Served",
    "Stage",
    "StaticBook",
    "Work",
    "busy_share",
    "cache_bytes",
    "choice_bytes",
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
    "serve",
    "serve_pipeline",
    "share",
    "tensor_bytes",
]
