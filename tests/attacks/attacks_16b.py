"""Answers to the katas of lesson 16b that must be rejected or accepted."""

from __future__ import annotations

import katas_dp_tp
import katas_pp_zero_cp

ATTACKS = {**katas_dp_tp.ATTACKS, **katas_pp_zero_cp.ATTACKS}
