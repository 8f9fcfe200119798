"""Write a plan as what other frameworks read: options, a configuration file, or a script.

Text alone: no framework is imported. The names of options and their legal values are listed in
options.toml with the version of each framework; a test compares what is written with that list.
"""

from course_lib.planner.catalog import Model
from course_lib.planner.configuration import Configuration, suggestion
from course_lib.planner.emit import deepspeed, fsdp2, megatron, torchtitan
from course_lib.planner.emit.emitted import Emitted, Options, options
from course_lib.planner.hardware import Hardware

_WRITERS = {
    "megatron": megatron.write,
    "torchtitan": torchtitan.write,
    "deepspeed": deepspeed.write,
    "fsdp2": fsdp2.write,
}
TARGETS = tuple(_WRITERS)


def emit(target: str, model: Model, hardware: Hardware, configuration: Configuration) -> Emitted:
    """Return the plan for ``target``, and in notes what the target cannot express.

    Raises ValueError if ``target`` is not in TARGETS, or the GPU lacks the number format.
    """
    if target not in _WRITERS:
        raise ValueError(
            f"no framework of --emit is called {target!r}; {suggestion(target, TARGETS)}"
        )
    hardware.peak_of(configuration.dtype.name)
    return _WRITERS[target](model, hardware, configuration)
