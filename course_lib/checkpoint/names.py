"""What the whole model calls the weights of this rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from course_lib.model import Decoder

Model = Decoder | Mapping[int, Decoder]


def stages_of(model: Model) -> list[Decoder]:
    """A whole decoder is one stage."""
    return [model] if isinstance(model, Decoder) else list(model.values())


def names_in_whole(stages: Sequence[Decoder]) -> dict[nn.Parameter, str]:
    """Of every parameter on this rank its name in the whole model.

    Raises ValueError when two parameters have one name.
    """
    names: dict[nn.Parameter, str] = {}
    for stage in stages:
        for prefix, module in _modules(stage).items():
            for name, parameter in () if module is None else module.named_parameters(prefix):
                names.setdefault(parameter, name)
    if twice := [name for name, count in Counter(names.values()).items() if count > 1]:
        raise ValueError(
            f"two weights of this rank are {twice[0]} in the whole model, and would drift apart: "
            "cut the model into stages after all else, so that what is tied stays one weight"
        )
    return names


def _modules(stage: Decoder) -> dict[str, nn.Module | None]:
    """By their names in the whole model.

    A slice counts its own blocks from 0, and may have one end of a tied pair alone.
    """
    return {
        "embedding": stage.embedding,
        **{f"blocks.{block.layer}": block for block in stage.blocks},
        "norm": stage.norm,
        "embedding.token" if stage.config.tied else "head": stage.head,
    }


def tied_copies(stages: Sequence[Decoder]) -> set[Tensor]:
    """Heads that are tied to an embedding on another rank, which is the one to be saved.

    Both hold the same bits, but ZeRO cuts the flats of the two stages in different places: their
    boxes would overlap.
    """
    heads = {s.head.weight for s in stages if s.config.tied and s.head is not None}
    return heads - {s.embedding.token.weight for s in stages if s.embedding is not None}
