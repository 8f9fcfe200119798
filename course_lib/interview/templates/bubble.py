"""Questions on the bubble and the time of a pipeline."""

from __future__ import annotations

from itertools import count
from random import Random

from course_lib.interview.questions import Amount, Draw, Template
from course_lib.schedule import Costs, make, predicted_bubble, simulate


def of_ideal(share: float) -> float:
    """Return a share of the total time as a share of the ideal time."""
    return share / (1 - share)


def _sizes(rng: Random) -> tuple[int, int]:
    return rng.choice((4, 6, 8, 12, 16)), rng.choice((8, 16, 24, 32, 64))


def of_total(rng: Random) -> Draw:
    """Ask for the bubble of 1F1B as a share of the total time."""
    p, m = _sizes(rng)
    value = predicted_bubble("1f1b", p, m)
    mistakes = {
        "bubble-of-ideal": of_ideal(value),
        "all-stages": of_ideal(predicted_bubble("1f1b", p + 1, m)),
        "naive": predicted_bubble("naive", p, m),
        "busy-share": 1 - value,
    }
    return Draw(
        {"stages": p, "microbatches": m}, value, mistakes, {"less": p - 1, "all": m + p - 1}
    )


def ideal(rng: Random) -> Draw:
    """Ask for the bubble of 1F1B as a share of the ideal time."""
    p, m = _sizes(rng)
    total = predicted_bubble("1f1b", p, m)
    mistakes = {
        "bubble-of-total": total,
        "all-stages": of_ideal(predicted_bubble("1f1b", p + 1, m)),
        "naive": predicted_bubble("naive", p, m),
    }
    return Draw({"stages": p, "microbatches": m}, of_ideal(total), mistakes, {"less": p - 1})


def interleaved(rng: Random) -> Draw:
    """Ask for the bubble with several chunks per rank."""
    p, v = rng.choice((4, 8, 16)), rng.choice((2, 3, 4))
    m = p * rng.choice((1, 2, 4))
    value = predicted_bubble("interleaved", p, m, v)
    mistakes = {
        "bubble-of-ideal": of_ideal(value),
        "no-chunks": predicted_bubble("1f1b", p, m),
        "divided-share": predicted_bubble("1f1b", p, m) / v,
        "more-stages": predicted_bubble("1f1b", p * v, m),
    }
    given = {"stages": p, "microbatches": m, "chunks": v}
    return Draw(given, value, mistakes, {"less": p - 1, "all": m * v + p - 1})


def fewest(rng: Random) -> Draw:
    """Ask for the fewest micro-batches below a bubble."""
    p, percent = rng.choice((4, 8, 12, 16)), rng.choice((5, 8, 10, 15, 20))

    def least(stages: int, ideal_base: bool) -> int:
        for m in count(1):
            share = predicted_bubble("1f1b", stages, m)
            if (of_ideal(share) if ideal_base else share) <= percent / 100 * (1 + 1e-9):
                return m
        raise AssertionError

    value = least(p, False)
    mistakes = {"bubble-of-ideal": least(p, True), "all-stages": least(p + 1, False)}
    return Draw({"stages": p, "percent": percent}, value, mistakes, {"less": p - 1})


def step_time(rng: Random) -> Draw:
    """Ask for the time of a 1F1B step."""
    p, m = rng.choice((4, 6, 8)), rng.choice((8, 12, 16, 32))
    f, b = rng.choice(((10, 20), (12, 24), (15, 30), (20, 45)))
    costs = Costs.make(f=f / 1000, b=b / 1000)
    rows = simulate(make("1f1b", p, m), costs)
    mistakes = {
        "no-bubble": rows.work,
        "all-stages": simulate(make("1f1b", p + 1, m), costs).makespan,
        "naive": simulate(make("naive", p, m), costs).makespan,
        "forward-only": simulate(make("1f1b", p, m), Costs.make(f=f / 1000, b=0)).makespan,
    }
    given = {"stages": p, "microbatches": m, "f": f, "b": b}
    return Draw(given, rows.makespan, mistakes, {"all": m + p - 1, "pair": f + b})


def zb_h1(rng: Random) -> Draw:
    """Ask for the bubble of ZB-H1 with equal F, I and W."""
    p, m = rng.choice((4, 8, 16)), rng.choice((16, 32, 64))
    costs = Costs(1, 1, 1)
    value = predicted_bubble("zb-h1", p, m, costs=costs)
    mistakes = {
        "no-split": predicted_bubble("1f1b", p, m),
        "bubble-of-ideal": of_ideal(value),
        "all-stages": predicted_bubble("zb-h1", p + 1, m, costs=costs),
    }
    return Draw({"stages": p, "microbatches": m}, value, mistakes, {"less": p - 1, "work": 3 * m})


def lost_gpus(rng: Random) -> Draw:
    """Ask for the idle GPU time of a run, in hours."""
    p, m, dp = rng.choice((4, 8, 16)), rng.choice((8, 16, 32)), rng.choice((8, 16))
    hours = rng.choice((10, 24, 100))
    seconds, share = hours * 3600.0, predicted_bubble("1f1b", p, m)
    mistakes = {
        "bubble-of-ideal": p * dp * seconds * of_ideal(share),
        "one-replica": p * seconds * share,
        "no-pp": dp * seconds * share,
        "busy-share": p * dp * seconds * (1 - share),
    }
    given = {"stages": p, "microbatches": m, "dp": dp, "hours": hours}
    more = {"less": p - 1, "all": m + p - 1, "gpus": p * dp, "share": Amount(share, "share")}
    return Draw(given, p * dp * seconds * share, mistakes, more)


TEMPLATES = (
    Template("bubble-total", "07", "share", of_total),
    Template("bubble-ideal", "07", "share", ideal),
    Template("bubble-interleaved", "08", "share", interleaved),
    Template("bubble-fewest", "07", "count", fewest, 0),
    Template("bubble-time", "07", "s", step_time),
    Template("bubble-zb-h1", "08", "share", zb_h1),
    Template("bubble-lost", "07", "s", lost_gpus),
)
