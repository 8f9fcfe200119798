"""The KV cache: keys and values of earlier tokens are stored, so a new token costs one row.

Causal attention never changes what earlier positions computed, so their K and V (after RoPE) may
be stored. A layer's cache takes the place of its attention's core: it writes the new rows and lets
the queries see every row up to their own position.

Row t of a slot is position t. A slot is never cleared: the next request writes position 0, 1, ..
again, and the rows of the previous request stay at positions that no query sees yet.

Letters beside those of :mod:`course_lib.model`: N slots, T rows of a slot.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib import comm
from course_lib.inference.scheduler import Work
from course_lib.model import Attention, AttentionCore, Decoder
from course_lib.tp import RowLinear


class LayerCache:
    """K and V of one layer; the core of its attention."""

    def __init__(self, cache: Cache, attention: Attention, rows: int) -> None:
        head_dim, weight = attention.config.head_dim, attention.k.weight
        heads = len(weight) // head_dim  # under tensor parallelism a share
        self.cache, self.attention, core = cache, attention, attention.core
        self.before: AttentionCore = core.before if isinstance(core, LayerCache) else core
        self.keys_NTGK = weight.new_zeros(cache.slots, rows, heads, head_dim).detach()
        self.values_NTGK = torch.zeros_like(self.keys_NTGK)

    def __call__(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
        """Attention (B, S, H, K) of the new queries on all rows so far, their own included."""
        slots_B1, positions_BS, end = self.cache.slots_B1, self.cache.positions_BS, self.cache.end
        self.keys_NTGK[slots_B1, positions_BS] = k_BSGK
        self.values_NTGK[slots_B1, positions_BS] = v_BSGK
        # A copy of B slots. Real servers read pages in place (Kwon et al. 2023, arXiv:2309.06180).
        k_BGTK, v_BGTK = (
            x_NTGK[slots_B1[:, 0], :end].transpose(1, 2)
            for x_NTGK in (self.keys_NTGK, self.values_NTGK)
        )
        rows_T = torch.arange(end, device=q_BSHK.device)
        seen_B1ST = (rows_T <= positions_BS[..., None])[:, None]
        y_BHSK = F.scaled_dot_product_attention(
            q_BSHK.transpose(1, 2),
            k_BGTK,
            v_BGTK,
            attn_mask=seen_B1ST,
            enable_gqa=q_BSHK.shape[2] != k_BSGK.shape[2],
        )
        return y_BHSK.transpose(1, 2)


class Cache:
    """The caches of all layers of ``model``, a whole one or a stage.

    ``slots`` requests at once, of up to ``capacity`` positions each (default: max_seq_len). From
    :meth:`open` to :meth:`leave` the model does nothing but inference with this cache. Raises
    ValueError for a capacity above max_seq_len, where dropout is on, and under sequence
    parallelism.
    """

    def __init__(self, model: Decoder, slots: int, capacity: int | None = None) -> None:
        config = model.config
        self.capacity = config.max_seq_len if capacity is None else capacity
        if slots < 1 or not 1 <= self.capacity <= config.max_seq_len:
            raise ValueError(
                f"expected at least 1 slot and a capacity of 1 to "
                f"max_seq_len={config.max_seq_len}, got slots={slots} and capacity={self.capacity}"
            )
        if model.training and config.dropout:
            raise ValueError("dropout is on: call model.eval() first")
        linears = (module for module in model.modules() if isinstance(module, RowLinear))
        if any(linear.leave is not comm.reduce_from for linear in linears):
            raise ValueError(
                "sequence parallelism: ranks would share the positions of a decode, which has one; "
                "parallelize with tp.REGION"
            )
        self.slots = slots
        self.device = next(model.parameters()).device
        self.layers = [self.layer(block.attn) for block in model.blocks]  # type: ignore[arg-type]

    def layer(self, attention: Attention) -> LayerCache:
        """The cache of one layer."""
        return LayerCache(self, attention, self.capacity)

    @property
    def nbytes(self) -> int:
        """What :func:`cache_bytes` says."""
        return sum(layer.keys_NTGK.nbytes + layer.values_NTGK.nbytes for layer in self.layers)

    def open(self, work: Work) -> tuple[Tensor, Tensor]:
        """Make ready for the forward of ``work``: its (tokens_BS, positions_BS)."""
        if work.end > self.capacity:
            raise ValueError(
                f"requests {list(work.requests)} need {work.end} positions, and a slot has "
                f"capacity={self.capacity}: build the cache with more"
            )
        for layer in self.layers:  # each time: the model may have other caches too
            layer.attention.core = layer
        self.end = work.end
        self.slots_B1 = torch.tensor(work.slots, dtype=torch.int64, device=self.device)[:, None]
        self.positions_BS = work.positions_BS(self.device)
        return work.tokens_BS(self.device), self.positions_BS

    def leave(self) -> None:
        """Make the model what it was before: it can be trained again. The rows stay here."""
        for layer in self.layers:
            layer.attention.core = layer.before
