"""The checks of the claims, a module per note. Each returns (claimed, computed[, otherwise]).

Nothing here launches ranks: the values come from formulas, the planner, simulated schedules, code
fragments run in this process, and signatures of torch.
"""

Numbers = tuple[float, ...]
