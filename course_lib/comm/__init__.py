"""All communication goes through this package.

Collectives take ``(x, axis)`` and do not write to ``x``; functions that write in place say so.

=============  ====================================================================
transfer       the path to torch.distributed: a call, one record, one handle
collectives    all_reduce, all_gather, reduce_scatter, broadcast
operators      their autograd pairs (copy_to, reduce_from, ...); all_to_all
p2p            send, recv, exchange, ring
from_messages  the same collectives built from send and recv, for study
flat           many tensors sent as one
sharding       how a parameter is sharded: ShardSpec, set and read here
held           gradients of which a rank holds a shard: sums and global norm
alpha_beta     the cost model of a message
instruments/   checks, deadlock watch, emulated links, priorities: absent otherwise
=============  ====================================================================
"""

from typing import TYPE_CHECKING

from course_lib.aliases import aliases
from course_lib.comm.collectives import (
    all_gather,
    all_reduce,
    all_reduce_max,
    barrier,
    broadcast,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from course_lib.comm.flat import (
    by_dtype_and_size,
    flatten,
    on_gradient,
    start_all_gather_flat,
    start_all_reduce_flat,
    unflatten,
)
from course_lib.comm.from_messages import (
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
    tree_broadcast,
    tree_reduce,
)
from course_lib.comm.held import (
    Held,
    clip_grad_norm,
    grad_norm,
    held_gradients,
    sum_gradients,
)
from course_lib.comm.instruments.priorities import Priorities
from course_lib.comm.operators import (
    Region,
    all_to_all,
    all_to_all_v,
    copy_to,
    gather_from,
    gather_from_sequence,
    own_shard,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from course_lib.comm.p2p import (
    Exchange,
    exchange,
    recv,
    ring,
    send,
    start_exchange,
    start_recv,
    start_send,
)
from course_lib.comm.sharding import (
    ShardSpec,
    is_sharded,
    set_shard_spec,
    shard_spec,
    take_shard,
)
from course_lib.comm.transfer import Handle

if not TYPE_CHECKING:  # mypy would take every name for an alias
    __getattr__ = aliases("course_lib.comm")
