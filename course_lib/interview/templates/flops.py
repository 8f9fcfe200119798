"""Questions on FLOPs, and on the days that a run takes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from random import Random

from course_lib.interview.questions import Amount, Draw, Template
from course_lib.planner.catalog import Model, model
from course_lib.planner.configuration import Configuration
from course_lib.planner.flops import (
    blocks_flops,
    hardware_flops,
    head_flops,
    layer_flops,
    step_flops,
)
from course_lib.planner.hardware import Hardware, hardware

MODELS = ("llama-2-7b", "llama-2-13b", "llama-3-8b", "llama-3-70b", "llama-3-405b")
GPUS = ("a100-80", "h100", "b200")
DAY = 86400.0


def matrices(sizes: Model) -> float:
    """Return the elements of all matrices that a token meets: a forward has 2 FLOPs for each."""
    blocks = blocks_flops(sizes, 1)
    return (blocks.projections + blocks.mlp + head_flops(sizes)) / 2


def per_token(sizes: Model) -> float:
    """Return the FLOPs of training per token, without scores: 6 for each weight."""
    blocks = blocks_flops(sizes, 1)
    return step_flops(sizes, Configuration(seq=1)) - 3 * blocks.core


def training(rng: Random) -> Draw:
    """Ask for the FLOPs of training on many tokens."""
    sizes, trillions = model(rng.choice(MODELS)), rng.choice((0.3, 1.0, 2.0, 15.0))
    tokens = trillions * 1e12
    value = per_token(sizes) * tokens
    mistakes = {
        "forward-only": value / 3,
        "no-multiply-add": value / 2,
        "no-forward": value * 2 / 3,
    }
    given = {"billions": matrices(sizes) / 1e9, "trillions": trillions}
    return Draw(given, value, mistakes)


def attention(rng: Random) -> Draw:
    """Ask for the FLOPs of attention scores per token of training."""
    sizes, seq = model(rng.choice(MODELS)), rng.choice((4096, 8192, 32768, 131072))
    value = 3 * blocks_flops(sizes, seq).core
    mistakes = {
        "full-scores": 3 * blocks_flops(sizes, seq, attention="full").core,
        "forward-only": value / 3,
        "one-layer": value / sizes.layers,
    }
    given = {"layers": sizes.layers, "hidden": sizes.hidden, "seq": seq}
    return Draw(given, value, mistakes)


def mlp(rng: Random) -> Draw:
    """Ask for the forward FLOPs of a SwiGLU MLP."""
    sizes, tokens = model(rng.choice(MODELS)), rng.choice((2048, 4096, 8192))
    value = tokens * layer_flops(sizes, 0, 1).mlp
    mistakes = {
        "two-matrices": value * 2 / 3,
        "no-multiply-add": value / 2,
        "with-backward": 3 * value,
    }
    return Draw({"hidden": sizes.hidden, "ffn": sizes.ffn, "tokens": tokens}, value, mistakes)


def recomputed(rng: Random) -> Draw:
    """Ask for the FLOPs of the blocks with full recomputation."""
    sizes, millions = model(rng.choice(MODELS)), rng.choice((1, 2, 4, 16))
    tokens = millions * 10**6

    def run(plan: Configuration) -> float:
        blocks = blocks_flops(sizes, 1)
        head = 3 * head_flops(sizes) + (3 + (plan.recompute == "full")) * blocks.core
        return tokens * (hardware_flops(sizes, plan) - head)

    value = run(Configuration(seq=1, recompute="full"))
    mistakes = {
        "no-recompute": run(Configuration(seq=1)),
        "forward-only": run(Configuration(seq=1, recompute="full")) - run(Configuration(seq=1)),
        "no-multiply-add": value / 2,
    }
    blocks = (blocks_flops(sizes, 1).projections + blocks_flops(sizes, 1).mlp) / 2
    return Draw({"billions": blocks / 1e9, "millions": millions}, value, mistakes)


def mfu(rng: Random) -> Draw:
    """Ask for the MFU of a measured throughput."""
    sizes, gpu = model(rng.choice(MODELS[:4])), hardware(rng.choice(GPUS[:2]))
    reached = rng.choice((0.32, 0.38, 0.42, 0.46, 0.51))
    rate = round(reached * gpu.peak["bf16"] / per_token(sizes), -1)
    value = rate * per_token(sizes) / gpu.peak["bf16"]
    mistakes = {
        "forward-only": value / 3,
        "no-multiply-add": value / 2,
        "recomputation-counts": value * 4 / 3,
    }
    given = {
        "billions": matrices(sizes) / 1e9,
        "rate": int(rate),
        "teraflops": gpu.peak["bf16"] / 1e12,
    }
    return Draw(given, value, mistakes, {"flops": Amount(rate * per_token(sizes), "flop")})


@dataclass(frozen=True)
class Run:
    """A training run: its model, tokens, GPUs and MFU."""

    sizes: Model
    trillions: float
    gpu: Hardware
    gpus: int
    percent: int

    @classmethod
    def drawn(cls, rng: Random) -> Run:
        """Return a run with the numbers of ``rng``."""
        return cls(
            model(rng.choice(MODELS)),
            rng.choice((1.0, 2.0, 5.0, 15.0)),
            hardware(rng.choice(GPUS)),
            rng.choice((256, 512, 1024, 4096)),
            rng.choice((30, 35, 40, 45)),
        )

    @property
    def flops(self) -> float:
        """FLOPs of the whole run."""
        return per_token(self.sizes) * self.trillions * 1e12

    @property
    def speed(self) -> float:
        """FLOP/s of one GPU at its peak."""
        return self.gpu.peak["bf16"]

    @property
    def gpu_seconds(self) -> float:
        """Seconds of one GPU."""
        return self.flops / (self.speed * self.percent / 100)

    def given(self) -> dict[str, object]:
        """Return what a question on this run names."""
        return {
            "billions": matrices(self.sizes) / 1e9,
            "trillions": self.trillions,
            "gpus": self.gpus,
            "teraflops": self.speed / 1e12,
            "percent": self.percent,
        }

    def more(self) -> dict[str, object]:
        """Return what its steps name besides."""
        return {
            "flops": Amount(self.flops, "flop"),
            "seconds": f"{self.gpu_seconds:.4g}",
            "reached": self.speed * self.percent / 100 / 1e12,
        }


def days(rng: Random) -> Draw:
    """Ask for the days of a run."""
    run = Run.drawn(rng)
    value = run.gpu_seconds / run.gpus
    mistakes = {
        "forward-only": value / 3,
        "no-mfu": value * run.percent / 100,
        "no-multiply-add": value / 2,
        "one-gpu": run.gpu_seconds,
    }
    return Draw(run.given(), value, mistakes, run.more())


def gpu_hours(rng: Random) -> Draw:
    """Ask for the GPU hours of a run."""
    run = Run.drawn(rng)
    mistakes = {
        "forward-only": run.gpu_seconds / 3,
        "no-mfu": run.gpu_seconds * run.percent / 100,
        "wall-clock": run.gpu_seconds / run.gpus,
    }
    return Draw(run.given(), run.gpu_seconds, mistakes, run.more())


def gpus_needed(rng: Random) -> Draw:
    """Ask for the GPUs that finish in time."""
    run, days_left = Run.drawn(rng), rng.choice((14, 30, 60))

    def needed(seconds: float) -> int:
        return ceil(seconds / (days_left * DAY))

    mistakes = {
        "forward-only": needed(run.gpu_seconds / 3),
        "no-mfu": needed(run.gpu_seconds * run.percent / 100),
        "no-multiply-add": needed(run.gpu_seconds / 2),
    }
    given = {name: value for name, value in run.given().items() if name != "gpus"}
    return Draw(given | {"days": days_left}, needed(run.gpu_seconds), mistakes, run.more())


def throughput(rng: Random) -> Draw:
    """Ask for the tokens per second of all GPUs."""
    run = Run.drawn(rng)
    value = run.gpus * run.speed * run.percent / 100 / per_token(run.sizes)
    mistakes = {
        "forward-only": 3 * value,
        "no-mfu": value / (run.percent / 100),
        "one-gpu": value / run.gpus,
        "no-multiply-add": 2 * value,
    }
    given = {name: each for name, each in run.given().items() if name != "trillions"}
    return Draw(given, value, mistakes, run.more())


TEMPLATES = (
    Template("flops-training", "01", "flop", training),
    Template("flops-attention", "01", "flop", attention),
    Template("flops-mlp", "01", "flop", mlp),
    Template("flops-recomputed", "01", "flop", recomputed),
    Template("flops-mfu", "01", "share", mfu),
    Template("days-run", "01", "s", days),
    Template("days-gpu-hours", "01", "s", gpu_hours),
    Template("days-gpus", "01", "count", gpus_needed),
    Template("days-throughput", "01", "token/s", throughput),
)
