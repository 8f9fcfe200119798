"""The plan as a JSON configuration of DeepSpeed."""

from __future__ import annotations

import json
from typing import Any

from course_lib.planner.catalog import Model
from course_lib.planner.configuration import Configuration
from course_lib.planner.emit.emitted import Emitted, nodes, options, title
from course_lib.planner.hardware import Hardware


def write(model: Model, hardware: Hardware, configuration: Configuration) -> Emitted:
    """Return JSON. Ranks are in the order of the planner: tp, cp, dp, pp, tp fastest."""
    pipeline, tensor = configuration.pp > 1, configuration.tp > 1
    zero = min(configuration.zero, 1) if pipeline else configuration.zero
    notes = _notes(model, hardware, configuration)
    config: dict[str, Any] = {
        "_comment": [title(model, hardware, configuration), options("deepspeed").origin, *notes],
        "train_micro_batch_size_per_gpu": configuration.micro_batch,
        "gradient_accumulation_steps": configuration.micro_batches,
    }
    if not tensor:
        config["train_batch_size"] = configuration.global_batch
    config["zero_optimization"] = {"stage": zero, "overlap_comm": True}
    config |= _precision(configuration)
    config["optimizer"] = {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    }
    config["gradient_clipping"] = 1.0
    if configuration.recompute == "full":
        config["activation_checkpointing"] = {"partition_activations": False}
    if tensor and not pipeline:
        config["tensor_parallel"] = {"autotp_size": configuration.tp}
    if configuration.cp > 1:
        config["sequence_parallel_size"] = configuration.cp
    if model.experts is not None and configuration.ep > 1 and not (tensor and pipeline):
        preset = "deepseek_v3" if model.latent else "mixtral"
        config["expert_parallel"] = {
            "enabled": True,
            "autoep_size": configuration.ep,
            "preset_model": preset,
        }
    return Emitted(json.dumps(config, indent=2) + "\n", tuple(notes), ".json")


def _precision(configuration: Configuration) -> dict[str, Any]:
    name = configuration.dtype.name
    if name in ("bf16", "fp8"):
        wide = configuration.recipe != 16
        # Without ZeRO the two formats must be equal.
        accumulation = "fp32" if wide and configuration.zero > 0 else "bf16"
        return {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": accumulation}}
    return {"fp16": {"enabled": True}} if name == "fp16" else {}


def _notes(model: Model, hardware: Hardware, configuration: Configuration) -> list[str]:
    tp, cp, pp = configuration.tp, configuration.cp, configuration.pp
    count, ranks = nodes(hardware, configuration)
    notes = [
        f"Start with: deepspeed --num_nodes {count} --num_gpus {ranks} train.py "
        "--deepspeed_config plan.json",
        "The sizes of the model are in your code, not in this file.",
    ]
    if pp > 1:
        notes.append(_pipeline_note(configuration))
        if configuration.zero > 1:
            notes.append(
                f"DeepSpeed refuses ZeRO-{configuration.zero} with a pipeline; this file has "
                "ZeRO-1."
            )
    if tp > 1:
        notes.append(_tensor_note(configuration))
    if cp > 1:
        notes.append(_context_note(model, configuration))
    if configuration.recompute != "none":
        notes.append(
            "Recomputation is a call in your model: deepspeed.checkpointing.checkpoint(block, x) "
            f"computes a block again; {configuration.recompute} is decided there."
        )
    if configuration.zero == 0 and configuration.dtype.name in ("bf16", "fp8"):
        notes.append("Without ZeRO DeepSpeed accumulates the gradients of bf16 in bf16.")
    if configuration.dtype.name in ("fp8", "fp64"):
        notes.append(f"DeepSpeed has no {configuration.dtype.name} training in its configuration.")
    if model.experts is not None:
        notes += _expert_notes(configuration)
    if model.latent is not None:
        notes.append("Latent attention is in your model; DeepSpeed has no option for it.")
    return notes


def _pipeline_note(configuration: Configuration) -> str:
    text = (
        "The pipeline is in your code: deepspeed.pipe.PipelineModule(layers, "
        f"num_stages={configuration.pp}), which runs 1F1B with one stage per rank."
    )
    if configuration.schedule != "1f1b" or configuration.chunks > 1:
        text += f" DeepSpeed has no schedule {configuration.schedule}."
    if configuration.stage_layers:
        text += f" For the plan's stages of {list(configuration.stage_layers)} layers write your "
        text += "own partition_method."
    return text


def _tensor_note(configuration: Configuration) -> str:
    if configuration.pp > 1:
        return (
            f"tp {configuration.tp} inside a pipeline: DeepSpeed makes the groups "
            "(PipeModelDataParallelTopology), your layers do the rest; AutoTP is for models "
            "without a pipeline."
        )
    return (
        f"AutoTP shards the linears of Hugging Face models over {configuration.tp} ranks; it has "
        "no sequence parallelism, so norms and residuals are stored in full. train_batch_size is "
        "left out because DeepSpeed counts the ranks of tp in it."
    )


def _context_note(model: Model, configuration: Configuration) -> str:
    text = (
        "DeepSpeed has no ring: sequence_parallel_size is Ulysses (all-to-all over heads) and "
        "needs UlyssesSPAttentionHF in your code."
    )
    if model.kv_heads % configuration.cp:
        text += f" cp {configuration.cp} does not divide {model.kv_heads} KV heads."
    if configuration.tp > 1:
        text += " It cannot be combined with AutoTP."
    return text


def _expert_notes(configuration: Configuration) -> list[str]:
    if configuration.ep == 1:
        return []
    notes = ["AutoEP detects the experts of Hugging Face models; check preset_model."]
    if configuration.tp > 1 and (configuration.zero == 3 or configuration.pp > 1):
        notes.append("DeepSpeed refuses AutoEP with AutoTP and ZeRO-3 or a pipeline.")
    return notes
