"""Instruments: whatever watches or disturbs traffic stands around ``comm.transfer.issue``.

The launcher installs what the conditions of a run ask for. Without them no function here runs.

==========  ===================================================================
checks      checked mode: do all ranks make the same call, the same groups?
watch       ranks that wait for one another for ever are found
links       emulated links: transfers take their alpha-beta time
priorities  ``with comm.Priorities(...)``: buckets give way to urgent calls
==========  ===================================================================
"""

from __future__ import annotations

import torch

from course_lib.comm.instruments.checks import Checks
from course_lib.comm.instruments.links import EmulatedLinks
from course_lib.mesh import Conditions, Instrument


def installed(
    conditions: Conditions, device: torch.device, cells: dict[str, str], run: int = 0
) -> tuple[Instrument, ...]:
    """Return the instruments of a run, outermost first: checks, then emulated links (CPU only).

    ``cells`` maps the file name of a cell to how a message names it; ``run`` numbers the runs of
    ranks that are kept.
    """
    found: list[Instrument] = []
    if conditions.checked:
        found.append(Checks(cells, run))
    if conditions.links is not None and device.type == "cpu":
        found.append(EmulatedLinks(conditions.links))
    return tuple(found)
