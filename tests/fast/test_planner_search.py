"""The search is exact: brute force finds the same plans, they fit, and they are in order."""

from __future__ import annotations

import json
import shlex

import pytest

from course_lib import cli
from course_lib.planner import configure, custom_model, hardware, model
from course_lib.planner.configuration import RECOMPUTE
from course_lib.planner.estimate import estimate
from course_lib.planner.memory import exceeds, memory
from course_lib.planner.search import MICRO_BATCHES, SCHEDULES, candidates, common_batch, search
from course_lib.planner.text import ranking
from course_lib.schedule.named import V_SHAPED

SMALL = custom_model("llama", layers=8, hidden=2048, heads=16, kv_heads=4, vocab=32000)
MOE = custom_model("llama", layers=8, hidden=1024, heads=8, vocab=32000, experts=8)
PLAIN = {"fused_attention": False}
WORLDS = [
    (SMALL, "a100-40", 8, {"recompute": "none"}),
    (SMALL, "v100-16", 4, {"dtype": "fp16", **PLAIN}),
    (MOE, "h100", 4, {"global_batch": 16}),
    (model("llama-3-8b"), "a100-40", 16, {"tp": 4, "global_batch": 32}),
    (SMALL, "h100", 12, {"zero": 1}),
    (SMALL, "a100-40", 4, {"schedule": "zb-h2", "global_batch": 16}),
]


@pytest.mark.parametrize(("of", "on", "gpus", "fixed"), WORLDS)
def test_the_best_plans_are_those_of_brute_force(of, on, gpus, fixed):
    machine = hardware(on)
    steps = []
    for index, one in enumerate(candidates(of, gpus, **fixed)):
        found = estimate(of, machine, one.plan)
        if found.fits:
            steps.append((found.step_seconds, index, one.plan))
    steps.sort(key=lambda each: each[:2])
    result = search(of, machine, gpus, top=10, **fixed)
    assert [plan.step_seconds for plan in result.plans] == [seconds for seconds, *_ in steps[:10]]
    assert [plan.configuration for plan in result.plans] == [plan for *_, plan in steps[:10]]
    assert result.estimated <= result.examined <= result.legal


@pytest.mark.parametrize(("of", "on", "gpus", "fixed"), WORLDS[:3])
def test_the_candidates_are_what_configure_accepts(of, on, gpus, fixed):
    """Brute force over all arguments, the illegal ones included."""
    batch = fixed.get("global_batch") or common_batch(gpus, of.max_seq_len)
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    ways = [(name, 2 if name in V_SHAPED else 1) for name in SCHEDULES if name != "interleaved"]
    ways += [("interleaved", chunks) for chunks in range(2, 9)]
    legal = set()
    for tp in divisors:
        for pp in divisors:
            for cp in divisors:
                dp = gpus // (tp * pp * cp)
                for ep in divisors:
                    for schedule, chunks in ways if pp > 1 else ways[:1]:
                        for micro_batch in MICRO_BATCHES:
                            arguments = {
                                **fixed, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "chunks": chunks,
                                "schedule": schedule, "micro_batch": micro_batch,
                                "global_batch": batch,
                            }  # fmt: skip
                            try:
                                configure(of, gpus, **arguments)
                            except ValueError:
                                continue
                            legal.add((tp, pp, cp, dp, ep, schedule, chunks, micro_batch))
    found = {
        (p.tp, p.pp, p.cp, p.dp, p.ep, p.schedule, p.chunks, p.micro_batch)
        for p in (one.plan for one in candidates(of, gpus, **fixed))
    }
    assert found == legal


@pytest.mark.parametrize(("of", "on", "gpus", "fixed"), WORLDS)
def test_every_candidate_is_a_configuration(of, on, gpus, fixed):
    plans = [one.plan for one in candidates(of, gpus, **fixed)]
    assert len(plans) == len(set(plans)) > 10
    for plan in plans[::7]:
        again = configure(
            of, gpus, tp=plan.tp, pp=plan.pp, cp=plan.cp, ep=plan.ep, zero=plan.zero,
            schedule=plan.schedule, chunks=plan.chunks, micro_batch=plan.micro_batch,
            global_batch=plan.global_batch, recompute=plan.recompute, dtype=plan.dtype.name,
            fused_attention=plan.fused_attention,
        )  # fmt: skip
        assert again == plan
    recomputed = {plan.recompute for plan in plans}
    every = {"none", "full"} if "fused_attention" not in fixed else set(RECOMPUTE)
    assert recomputed == ({fixed["recompute"]} if "recompute" in fixed else every)
    assert all(getattr(plan, name) == fixed[name] for plan in plans for name in {"tp"} & set(fixed))


def test_listed_plans_fit_in_order_with_reasons():
    result = search(model("llama-3-70b"), hardware("h100"), 64, top=8)
    steps = [plan.step_seconds for plan in result.plans]
    assert steps == sorted(steps)
    assert len(steps) == 8
    for plan in result.plans:
        assert plan.fits
        assert memory(plan.model, plan.configuration).total <= 0.92 * plan.hardware.capacity_bytes
        assert plan.configuration.world == 64
    assert result.reasons[0] == ""
    assert all("longer" in reason or "equally" in reason for reason in result.reasons[1:])
    again = search(model("llama-3-70b"), hardware("h100"), 64, top=8)
    assert again.plans == result.plans
    text = ranking(result)
    assert max(map(len, text.splitlines())) <= 80
    assert "tp" in text


def test_selective_recomputation_saves_nothing_with_fused_attention():
    """So the search leaves it out."""
    of = model("gpt-3-175b")
    plans = [configure(of, 64, tp=8, pp=8, recompute=name) for name in ("none", "selective")]
    assert memory(of, plans[0]) == memory(of, plans[1])


@pytest.mark.parametrize(("of", "on", "gpus", "fixed"), WORLDS[:3])
def test_what_exceeds_a_limit(of, on, gpus, fixed):
    for one in list(candidates(of, gpus, **fixed))[::5]:
        need = memory(of, one.plan).total
        assert exceeds(of, one.plan, 0.999 * need)
        assert not exceeds(of, one.plan, need)


def test_nothing_fits():
    result = search(model("llama-3-405b"), hardware("v100-16"), 8, dtype="fp16")
    assert (result.plans, result.estimated) == ((), 0)
    assert result.examined == result.legal > 0
    assert "more GPUs" in ranking(result)
    least = min(
        memory(result.model, one.plan).total for one in candidates(result.model, 8, dtype="fp16")
    )
    assert f"{least / 1e9:.1f} GB per GPU" in " ".join(ranking(result).split())


@pytest.mark.parametrize(
    ("gpus", "seq", "batch"), [(8, 8192, 512), (12, 8192, 516), (1024, 8192, 512)]
)
def test_the_common_batch_has_many_divisors(gpus, seq, batch):
    assert common_batch(gpus, seq) == batch


def test_search_by_command(capfd):
    line = "plan llama-3-8b --gpus 16 --hardware h100 --search --top 3 --pp 1 --json"
    assert cli.main(shlex.split(line)) == 0
    data = json.loads(capfd.readouterr().out)
    assert len(data["plans"]) == 3
    assert data["plans"][0]["behind"] == ""
    assert {plan["configuration"]["pp"] for plan in data["plans"]} == {1}
    assert cli.main(shlex.split("plan gpt2-xl --gpus 7 --hardware h100 --search --tp 2")) == 2
    assert "tp x pp x cp to divide 7 GPUs" in capfd.readouterr().err


@pytest.mark.alone
def test_70b_on_1024_gpus_takes_seconds():
    import time

    start = time.process_time()
    result = search(model("llama-3-70b"), hardware("h100"), 1024)
    assert time.process_time() - start < 15
    assert result.legal > 10_000
    assert len(result.plans) == 10
