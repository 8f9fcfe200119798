"""01-1: parameters, bytes, days and seconds of two models, worked out on paper."""

from __future__ import annotations

from typing import Any

from course_lib.grading.exercise import Wrong
from course_lib.grading.worked import Worked

WANTED = {
    "block": 128,
    "parameters": 340,
    "state, bytes": 5440,
    "cache, bytes": 1600,
    "state, GB": 576,
    "state, GiB": 576e9 / 2**30,
    "GPUs": 8,
    "days, 1 GPU": 6000,
    "days, 500 GPUs": 12,
    "sent, GB": 135,
    "sending, s": 2.7,
    "computing, s": 2.16,
    "binds": "network",
}


def _but(entries: dict[str, Any]) -> dict[str, Any]:
    """The right table with other ``entries``."""
    return {**WANTED, **entries}


BY_HAND = Worked(
    id="01-1",
    title="a model counted by hand",
    names=("table",),
    hints=(
        "Write down the shape of each matrix of the small block; a head has 4 / 2 = 2 features. "
        "For the large model begin with bytes a parameter, and with FLOPs for each parameter and "
        "token.",
        "q and o are 4 x 4, k and v 4 x 2, the MLP has three of 4 x 6. State is 16 bytes a "
        "parameter. A run is 6 P T FLOPs. A ring of n sends 2(n-1)/n of the gradients; 400 Gb/s "
        "are 50 GB/s.",
        "128 = 48 + 72 + 8. Days: 6 * 36e9 * 960e9 / 4e14 / 86400. Sending: 2 * 15/16 * 72 GB / "
        "50 GB/s. Computing: 6 * 36e9 * 4000 / 4e14.",
    ),
    wrong=(
        Wrong(
            _but({"block": 144}),
            "k and v have one head of 2 features, not as many as q.",
        ),
        Wrong(
            _but({"block": 104}),
            "the MLP of a llama has three matrices: gate, up and down.",
        ),
        Wrong(_but({"block": 120}), "the two norms have a weight for each feature too."),
        Wrong(_but({"parameters": 300}), "embedding and head are two tables here."),
        Wrong(_but({"parameters": 336}), "one more norm stands behind the last block."),
        Wrong(_but({"parameters": 256}), "these are the blocks alone."),
        Wrong(
            _but({"state, bytes": 4080}),
            "that is 12 bytes a parameter: weights and gradients have 2 each beside it.",
        ),
        Wrong(
            _but({"state, bytes": 6120}),
            "that is 18 bytes a parameter: gradients have 2 bytes here, not 4.",
        ),
        Wrong(_but({"cache, bytes": 800}), "keys and values: two of them in each layer."),
        Wrong(
            _but({"cache, bytes": 3200}),
            "one head of keys and values is kept, however many query heads use it.",
        ),
        Wrong(_but({"state, GB": 72}), "weights alone are an eighth of it: 16 bytes a parameter."),
        Wrong(_but({"state, GB": 432}), "weights and gradients, 2 bytes each, belong to it too."),
        Wrong(
            _but({"state, GiB": 576}), "GB are 1e9 bytes, GiB are 2**30: there are fewer of them."
        ),
        Wrong(_but({"state, GiB": 576 * 2**30 / 1e9}), "the other way round: a GiB is larger."),
        Wrong(_but({"GPUs": 7}), "7 GPUs have 560 GB: round up."),
        Wrong(_but({"GPUs": 1}), "weights would fit on one GPU, the state does not."),
        Wrong(
            _but({"days, 1 GPU": 2000}),
            "2 FLOPs a parameter and token are the forward alone: backward has 4 more.",
        ),
        Wrong(_but({"days, 1 GPU": 144000}), "these are hours."),
        Wrong(_but({"sent, GB": 72}), "that is the tensor; a ring sends 2(n-1)/n times as much."),
        Wrong(_but({"sent, GB": 67.5}), "an all-reduce has two halves, and each sends (n-1)/n."),
        Wrong(_but({"sent, GB": 144}), "a rank's own piece stays where it is: (n-1)/n."),
        Wrong(_but({"sending, s": 0.3375}), "Gb/s are bits: a byte has eight."),
        Wrong(
            _but({"computing, s": 34.56}), "that is the work of all 16 GPUs: each has 4,000 tokens."
        ),
        Wrong(_but({"computing, s": 0.72}), "that is the forward alone."),
        Wrong(_but({"binds": "compute"}), "what takes longer is the limit."),
    ),
    right=(
        _but({"state, GiB": 536.4418029785156, "sent, GB": 135.0}),
        _but({"sending, s": 27 / 10, "computing, s": 54 / 25}),
    ),
    stub=dict.fromkeys(WANTED),
    wanted=WANTED,
)
