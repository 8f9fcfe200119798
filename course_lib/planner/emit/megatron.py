"""The plan as a torchrun command of Megatron-LM's pretrain_gpt.py."""

from __future__ import annotations

from course_lib.planner.catalog import Model
from course_lib.planner.configuration import Configuration
from course_lib.planner.emit.emitted import (
    WIDTH,
    Emitted,
    biases,
    comment,
    departures,
    learned_positions,
    options,
    title,
    torchrun,
    uneven_stages,
)
from course_lib.planner.hardware import Hardware

SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def write(model: Model, hardware: Hardware, configuration: Configuration) -> Emitted:
    """Return a command line. Ranks are in the order of the planner: tp, cp, dp, pp, tp fastest."""
    groups = [
        _parallelism(model, configuration),
        _data_parallelism(configuration),
        _batch(configuration),
        _model(model, configuration),
        _experts(model, configuration),
        _latent(model),
        _precision(configuration),
        # The run itself, which a plan does not decide: mock data and a learning rate.
        ["--train-iters 100", "--lr 3e-4", "--mock-data", "--tokenizer-type NullTokenizer"],
    ]
    notes = _notes(model, configuration)
    head = comment([title(model, hardware, configuration), options("megatron").origin, *notes])
    # NCCL kernels of tp and cp keep their order with computation only so; FSDP forbids it.
    ordered = configuration.tp * configuration.cp > 1 and configuration.zero < 2
    environment = "CUDA_DEVICE_MAX_CONNECTIONS=1 " if ordered else ""
    lines = [f"{environment}torchrun {torchrun(hardware, configuration)}", "    pretrain_gpt.py"]
    lines += [line for group in groups for line in _lines(group)]
    return Emitted(head + " \\\n".join(lines) + "\n", tuple(notes), ".sh")


def _lines(group: list[str]) -> list[str]:
    """Return the options of ``group`` in lines of at most WIDTH characters."""
    lines: list[str] = []
    for one in group:
        if lines and len(lines[-1]) + 1 + len(one) <= WIDTH:
            lines[-1] += " " + one
        else:
            lines.append("    " + one)
    return lines


def _parallelism(model: Model, configuration: Configuration) -> list[str]:
    found = [
        f"--tensor-model-parallel-size {configuration.tp}",
        f"--pipeline-model-parallel-size {configuration.pp}",
        f"--context-parallel-size {configuration.cp}",
    ]
    if configuration.tp > 1 and configuration.sequence_parallel:
        found += ["--sequence-parallel"]
    if configuration.cp > 1:
        found += ["--cp-comm-type p2p"]
    uneven = uneven_stages(model, configuration)
    if configuration.pp > 1 and uneven:
        layout = "|".join("t" * layers for layers in uneven)
        found += [f"--pipeline-model-parallel-layout 'E{layout}L'"]
    elif configuration.pp > 1 and configuration.chunks > 1:
        found += [f"--num-virtual-stages-per-pipeline-rank {configuration.chunks}"]
    if configuration.recompute == "full":
        found += [
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        ]
    if configuration.recompute == "selective":
        found += ["--recompute-granularity selective --recompute-modules core_attn"]
    return found


def _data_parallelism(configuration: Configuration) -> list[str]:
    if configuration.dp * configuration.cp == 1:
        return []
    if configuration.zero == 0:
        return ["--overlap-grad-reduce"]
    sharded = ["--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"]
    if configuration.zero > 1:
        strategy = SHARDING[configuration.zero]
        sharded += [f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy}"]
        sharded += ["--ckpt-format fsdp_dtensor"]
    return sharded


def _batch(configuration: Configuration) -> list[str]:
    return [
        f"--micro-batch-size {configuration.micro_batch}",
        f"--global-batch-size {configuration.global_batch}",
        f"--seq-length {configuration.seq}",
    ]


def _model(model: Model, configuration: Configuration) -> list[str]:
    learned = learned_positions(model)
    llama = model.family == "llama"
    return [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--ffn-hidden-size {model.ffn}",
        f"--num-attention-heads {model.heads}",
        *([f"--kv-channels {model.head_dim}"] if model.latent is None else []),
        *(
            [f"--group-query-attention --num-query-groups {model.kv_heads}"]
            if model.kv_heads < model.heads and model.latent is None
            else []
        ),
        f"--max-position-embeddings {max(model.max_seq_len, configuration.seq)}",
        f"--position-embedding-type {'learned_absolute' if learned else 'rope'}",
        *(["--normalization RMSNorm --swiglu"] if llama else ["--normalization LayerNorm"]),
        *([] if any(biases(model)) else ["--disable-bias-linear"]),
        *([] if model.tied else ["--untie-embeddings-and-output-weights"]),
        f"--vocab-size {model.vocab}",
        f"--hidden-dropout {model.dropout:g} --attention-dropout {model.dropout:g}",
    ]


def _experts(model: Model, configuration: Configuration) -> list[str]:
    experts = model.experts
    if experts is None:
        return []
    found = [
        f"--num-experts {experts.number}",
        f"--moe-router-topk {experts.top_k}",
        f"--moe-ffn-hidden-size {experts.ffn}",
        f"--expert-model-parallel-size {configuration.ep}",
        "--expert-tensor-parallel-size 1",
        "--moe-token-dispatcher-type alltoall",
        "--moe-grouped-gemm",
        "--moe-aux-loss-coeff 0.01",
    ]
    if experts.shared:
        found += [f"--moe-shared-expert-intermediate-size {experts.shared * experts.ffn}"]
    if experts.dense_layers:
        rest = model.layers - experts.dense_layers
        found += [f"--moe-layer-freq '([0]*{experts.dense_layers}+[1]*{rest})'"]
    if experts.router_bias:
        found += ["--moe-router-score-function sigmoid --moe-router-enable-expert-bias"]
    return found


def _latent(model: Model) -> list[str]:
    latent = model.latent
    if latent is None:
        return []
    return [
        "--multi-latent-attention",
        f"--q-lora-rank {latent.q_rank}",
        f"--kv-lora-rank {latent.kv_rank}",
        f"--qk-head-dim {latent.nope_dim}",
        f"--qk-pos-emb-head-dim {latent.rope_dim}",
        f"--v-head-dim {latent.value_dim}",
        "--qk-layernorm",
    ]


def _precision(configuration: Configuration) -> list[str]:
    found = {
        "bf16": ["--bf16"],
        "fp16": ["--fp16"],
        "fp8": ["--bf16", "--fp8-format hybrid", "--fp8-recipe tensorwise"],
    }.get(configuration.dtype.name, [])
    if "--bf16" in found and configuration.recipe == 16:
        found = [*found, "--grad-reduce-in-bf16"]
    if not configuration.fused_attention:
        found = [*found, "--attention-backend unfused"]
    return found


def _notes(model: Model, configuration: Configuration) -> list[str]:
    pp, chunks, name = configuration.pp, configuration.chunks, configuration.schedule
    notes = [f"Megatron-LM has no option for {one}." for one in departures(model)]
    attention, mlp = biases(model)
    if attention != mlp:
        one, other = ("attention", "MLP") if attention else ("MLP", "attention")
        notes.append(
            f"In the model only the linears of {one} have biases; with these options those of "
            f"{other} have them too."
        )
    planned = "interleaved" if chunks > 1 else "1f1b"
    if pp > 1 and name != planned:
        notes.append(f"Megatron-LM has no schedule {name}; it runs {planned} instead.")
    if pp > 1 and chunks > 1 and configuration.micro_batches < pp:
        notes.append(
            f"The interleaved schedule works in groups of {pp} micro-batches (one per stage); "
            f"the plan has {configuration.micro_batches} per step."
        )
    if configuration.zero > 1:
        notes.append(
            f"ZeRO-{configuration.zero} is Megatron-FSDP, which needs CUDA_DEVICE_MAX_CONNECTIONS "
            "unset or above 1; the distributed optimizer alone is ZeRO-1."
        )
        if pp > 1:
            notes.append(
                "Check ZeRO-2 or 3 with a pipeline on a small run: each micro-batch gathers or "
                "reduces again, and the parser does not refuse it."
            )
    if configuration.cp > 1 and configuration.seq % (2 * configuration.cp):
        notes.append(
            f"Megatron-LM needs a sequence length that 2 x cp = {2 * configuration.cp} divides, "
            f"got {configuration.seq}."
        )
    if configuration.dtype.name == "fp64":
        notes.append("Megatron-LM has no fp64; this command runs in fp32.")
    if model.experts is not None and configuration.ep > 1 and configuration.tp > 1:
        notes.append(
            "Megatron-LM takes the ranks of ep from tp first, then from cp and dp. The plan takes "
            "them from cp and dp only; each rank has as many experts and bytes, on nearer links."
        )
    multiple = 128 * configuration.tp
    if model.vocab % multiple:
        padded = -(-model.vocab // multiple) * multiple
        notes.append(
            f"Megatron-LM pads the vocabulary to {padded:,}, a multiple of 128 x tp; the plan "
            "pads it to a multiple of tp."
        )
    return notes
