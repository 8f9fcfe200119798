"""The plan as a TOML file for torchtitan's trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from course_lib.planner.catalog import Model
from course_lib.planner.configuration import Configuration
from course_lib.planner.emit.emitted import (
    Emitted,
    comment,
    departures,
    learned_positions,
    options,
    title,
    torchrun,
    uneven_stages,
)
from course_lib.planner.hardware import Hardware

# layers, hidden, heads, kv_heads, ffn, vocab, experts -> name and flavor
FLAVORS = {
    (32, 4096, 32, 8, 14336, 128256, 0): ("llama3", "8B"),
    (80, 8192, 64, 8, 28672, 128256, 0): ("llama3", "70B"),
    (126, 16384, 128, 8, 53248, 128256, 0): ("llama3", "405B"),
    (61, 7168, 128, 128, 18432, 129280, 256): ("deepseek_v3", "671B"),
}
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}


def write(model: Model, hardware: Hardware, configuration: Configuration) -> Emitted:
    """Return a TOML file. Ranks are in the order of the planner: tp, cp, dp, pp, tp fastest."""
    name, flavor, model_notes = _flavor(model)
    notes = [*model_notes, *_notes(model, configuration)]
    config: dict[str, dict[str, Any]] = {
        "job": {"description": title(model, hardware, configuration)},
        "model": {"name": name, "flavor": flavor},
        "optimizer": {"name": "AdamW", "lr": 3e-4},
        "training": _training(configuration),
        "parallelism": _parallelism(model, configuration),
        "activation_checkpoint": {"mode": configuration.recompute},
    }
    if configuration.recompute == "selective":
        config["activation_checkpoint"]["selective_ac_option"] = "op"
    if configuration.dtype.name == "fp8":
        config["model"]["converters"] = ["quantize.linear.float8"]
        config["quantize.linear.float8"] = {
            "recipe_name": "rowwise",
            "filter_fqns": ["output", "router.gate"],
        }
        config["compile"] = {"enable": True}
    run = f"torchrun {torchrun(hardware, configuration)} -m torchtitan.train"
    head = comment(
        [
            title(model, hardware, configuration),
            options("torchtitan").origin,
            "Later versions are configured in Python and read no TOML.",
            f"{run} --job.config_file plan.toml",
            *notes,
        ]
    )
    return Emitted(head + "\n" + _toml(config), tuple(notes), ".toml")


def _training(configuration: Configuration) -> dict[str, Any]:
    fp32 = configuration.dtype.name == "fp32"
    # A pipeline gets the sequences of all its micro-batches in one call.
    calls = 1 if configuration.pp > 1 else configuration.micro_batches
    return {
        "local_batch_size": configuration.sequences // calls,
        "global_batch_size": configuration.global_batch,
        "seq_len": configuration.seq,
        "steps": 100,
        "dtype": "float32",
        "mixed_precision_param": "float32" if fp32 else "bfloat16",
        "mixed_precision_reduce": "float32",
    }


def _parallelism(model: Model, configuration: Configuration) -> dict[str, Any]:
    # torchtitan's DDP works alone; with another axis replicas are FSDP's.
    alone = configuration.zero == 0 and configuration.dp == configuration.world
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": configuration.dp if alone else 1,
        "data_parallel_shard_degree": 1 if alone else configuration.dp,
        "fsdp_reshard_after_forward": "always" if configuration.zero == 3 else "never",
        "tensor_parallel_degree": configuration.tp,
        "context_parallel_degree": configuration.cp,
        "pipeline_parallel_degree": configuration.pp,
        "expert_parallel_degree": configuration.ep,
        "expert_tensor_parallel_degree": 1,
    }
    if configuration.cp > 1:
        found["context_parallel_rotate_method"] = "alltoall"
    if configuration.pp > 1:
        found["pipeline_parallel_schedule"] = _schedule(configuration)
        found["pipeline_parallel_microbatch_size"] = configuration.micro_batch
        found |= _stages(model, configuration)
    return found


def _schedule(configuration: Configuration) -> str:
    fallback = "Interleaved1F1B" if configuration.chunks > 1 else "1F1B"
    return SCHEDULES.get(configuration.schedule, fallback)


def _stages(model: Model, configuration: Configuration) -> dict[str, Any]:
    """Say which layers are in which stage; torchtitan's own split has fewer at both ends."""
    uneven = uneven_stages(model, configuration)
    if uneven is None:
        return {
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
            "pipeline_parallel_layers_per_stage": model.layers
            // (configuration.pp * configuration.chunks),
        }
    names = [
        [f"layers.{layer}" for layer in range(sum(uneven[:stage]), sum(uneven[: stage + 1]))]
        for stage in range(len(uneven))
    ]
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", "output"]
    return {"module_fqns_per_model_part": names}


def _flavor(model: Model) -> tuple[str, str, list[str]]:
    """Return name and flavor of torchtitan's model, and what to add to torchtitan."""
    experts = model.experts
    sizes = (model.layers, model.hidden, model.heads, model.kv_heads, model.ffn, model.vocab)
    known = FLAVORS.get((*sizes, experts.number if experts else 0))
    if known:
        return *known, []
    flavor = model.name
    if model.family != "llama" or learned_positions(model) or model.tied or departures(model):
        return (
            "llama3",
            flavor,
            [
                "torchtitan has no model with LayerNorm, GELU, learned positions or a tied "
                f"embedding in this form: write a model for {model.name} and register it."
            ],
        )
    if experts or model.latent:
        return (
            "deepseek_v3",
            flavor,
            [
                f"torchtitan has no flavor for {model.name}: its models with experts are "
                "deepseek_v3, llama4, qwen3 and gpt_oss. Add one with these sizes."
            ],
        )
    multiplier, multiple = _ffn_rule(model.ffn, model.hidden)
    arguments = (
        f"dim={model.hidden}, n_layers={model.layers}, n_heads={model.heads}, "
        f"n_kv_heads={model.kv_heads}, vocab_size={model.vocab}, "
        f"ffn_dim_multiplier={multiplier!r}, multiple_of={multiple}"
    )
    add = f'Add this flavor to llama3_args: "{flavor}": TransformerModelArgs({arguments})'
    return "llama3", flavor, [add]


def _ffn_rule(ffn: int, hidden: int) -> tuple[float, int]:
    """Return ffn_dim_multiplier and multiple_of with which torchtitan's rule gives ``ffn``.

    The rule: int(multiplier x int(8 hidden / 3)), rounded up to a multiple.
    """
    multiple = ffn & -ffn  # the largest power of two that divides it
    return (ffn - multiple / 2 + 1) / int(8 * hidden / 3), multiple


def _notes(model: Model, configuration: Configuration) -> list[str]:
    tp, cp, dp, pp = configuration.tp, configuration.cp, configuration.dp, configuration.pp
    notes = []
    if configuration.zero < 3 and dp * cp > 1 and not (configuration.zero == 0 and dp * tp == dp):
        notes.append(_zero_note(configuration))
    if configuration.zero == 0 and dp > 1 and dp != configuration.world:
        notes.append("torchtitan's DDP works with no other axis, so this file shards by FSDP.")
    if pp > 1 and configuration.schedule not in SCHEDULES:
        notes.append(
            f"torchtitan has no schedule {configuration.schedule} with "
            f"{configuration.chunks} stage(s) per rank; it runs {_schedule(configuration)} instead."
        )
    if configuration.recompute == "selective":
        notes.append(
            "Selective means another thing here: torchtitan saves the results of matrix products "
            "and attention and computes the rest again; the plan computes attention again."
        )
    if configuration.seq % (tp * 2 * cp if cp > 1 else tp):
        notes.append(
            f"torchtitan needs a sequence length that tp x 2 cp divides, got {configuration.seq}."
        )
    if tp > 1 and model.kv_heads % tp:
        notes.append(f"tp {tp} does not divide {model.kv_heads} KV heads; torchtitan needs that.")
    if tp > 1 and dp * cp == 1 and configuration.dtype.name != "fp32":
        notes.append(
            "Mixed precision comes with FSDP; with one replica the products run in float32."
        )
    if configuration.dtype.name in ("fp16", "fp64"):
        notes.append(f"torchtitan trains in bfloat16 or float32, not {configuration.dtype.name}.")
    if configuration.dtype.name in ("bf16", "fp8"):
        notes.append(
            "Weights, gradients and moments are stored in fp32: 16 bytes per parameter, sharded."
        )
    if model.experts is not None and tp > 1:
        notes.append(
            "torchtitan takes the ranks of ep from tp first, then from cp and dp; each rank has as "
            "many experts as in the plan."
            if configuration.ep > 1
            else "Without ep torchtitan divides each expert by tp; the plan has whole experts."
        )
    return notes


def _zero_note(configuration: Configuration) -> str:
    often = "step" if configuration.pp > 1 else "micro-batch"
    return (
        f"torchtitan has no ZeRO-{configuration.zero}: FSDP stores 1/(dp x cp) of the weights "
        "between steps. With never it gathers them, and reduces the gradients, once per "
        f"{often}."
    )


def _toml(config: Mapping[str, Mapping[str, Any]]) -> str:
    """Return TOML; JSON writes strings, numbers, booleans and lists alike."""
    tables = []
    for table, values in config.items():
        lines = [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)
