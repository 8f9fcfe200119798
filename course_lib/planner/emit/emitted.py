"""What every writer returns and uses: the listed options, the stages, the nodes, the title."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any

from course_lib.planner.catalog import Model
from course_lib.planner.configuration import Configuration
from course_lib.planner.hardware import Hardware

WIDTH = 96


@dataclass(frozen=True)
class Emitted:
    """``text`` of a file whose name ends in ``suffix``; ``notes`` say what it cannot express."""

    text: str
    notes: tuple[str, ...]
    suffix: str


@dataclass(frozen=True)
class Options:
    """The options of a framework that the writers use, by name: "int", "flag", or the choices."""

    name: str
    version: str
    commit: str
    options: Mapping[str, Any]

    @property
    def origin(self) -> str:
        """Say from which version the option names are."""
        return f"Option names as in {self.name} {self.version} (commit {self.commit})."


@cache
def options(target: str) -> Options:
    """Return what options.toml lists for ``target``."""
    text = Path(__file__).with_name("options.toml").read_text(encoding="utf-8")
    return Options(**tomllib.loads(text)[target])


def title(model: Model, hardware: Hardware, configuration: Configuration) -> str:
    """Return the plan in a line."""
    axes = (f"{axis} {getattr(configuration, axis)}" for axis in ("tp", "cp", "dp", "pp", "ep"))
    return (
        f"{model.name} on {configuration.world} {hardware.name}: {', '.join(axes)}, "
        f"ZeRO-{configuration.zero}"
    )


def comment(lines: Iterable[str]) -> str:
    """Return ``lines`` as comments, each of at most WIDTH characters."""
    wrapped = (part for line in lines for part in wrap(line, WIDTH) or [""])
    return "\n".join(f"# {part}".rstrip() for part in wrapped) + "\n"


def nodes(hardware: Hardware, configuration: Configuration) -> tuple[int, int]:
    """Return the number of nodes and the ranks per node, which are equal on all nodes."""
    most = min(hardware.gpus_per_node, configuration.world)
    ranks = next(n for n in range(most, 0, -1) if configuration.world % n == 0)
    return configuration.world // ranks, ranks


def torchrun(hardware: Hardware, configuration: Configuration) -> str:
    """Return the options of torchrun that start all ranks of the plan."""
    count, ranks = nodes(hardware, configuration)
    if count == 1:
        return f"--standalone --nproc-per-node {ranks}"
    return (
        f"--nnodes {count} --nproc-per-node {ranks} --node-rank $NODE_RANK "
        "--master-addr $MASTER_ADDR --master-port 29500"
    )


def uneven_stages(model: Model, configuration: Configuration) -> list[int] | None:
    """Return the layers of each stage in the order of the model; None if all have as many."""
    if configuration.stage_layers:
        return list(configuration.stage_layers)
    stages = configuration.pp * configuration.chunks
    least, more = divmod(model.layers, stages)
    if more == 0:
        return None
    return [least + (stage < more) for stage in range(stages)]


def departures(model: Model) -> list[str]:
    """Return in words how the blocks of the model differ from its family."""
    found = []
    if model.block_norms == 1:
        found.append("attention and MLP in parallel, after one norm")
    if model.head_bias:
        found.append("a bias of the LM head")
    return found


def learned_positions(model: Model) -> bool:
    """Return whether the model adds learned positions; else it has RoPE."""
    return model.family == "gpt" if model.positions is None else model.positions


def biases(model: Model) -> tuple[bool, bool]:
    """Return whether the linears of attention and of the MLP have biases."""
    given = model.attention_bias, model.mlp_bias
    attention, mlp = (model.family == "gpt" if one is None else one for one in given)
    return attention, mlp
