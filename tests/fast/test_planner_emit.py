"""What is written for other frameworks: legal options, degrees that multiply to all GPUs."""

from __future__ import annotations

import ast
import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from course_lib.planner import Configuration, Model, configure, custom_model, hardware, model
from course_lib.planner.emit import TARGETS, emit, options
from course_lib.planner.emit.torchtitan import _ffn_rule

LLAMA = model("llama-3-70b")
SMALL = custom_model("llama", layers=24, hidden=2048, heads=16, kv_heads=4, ffn=5632, vocab=32_000)
GPT = custom_model("gpt", layers=96, hidden=12288, heads=96, vocab=51_200)
MIXTRAL, DEEPSEEK = model("mixtral-8x7b"), model("deepseek-v3")
ENDS = (4, *[5] * 14, 6)  # 80 layers on 16 stages
PLANS: dict[str, tuple[Model, int, dict[str, Any]]] = {
    "interleaved": (LLAMA, 64, {"tp": 8, "pp": 4, "chunks": 2, "recompute": "full"}),
    "zero-3": (LLAMA, 64, {"tp": 8, "zero": 3}),
    "zero-2 with cp": (LLAMA, 64, {"tp": 4, "cp": 2, "zero": 2, "recompute": "selective"}),
    "zero-1": (LLAMA, 64, {"zero": 1}),
    "ddp": (SMALL, 8, {"zero": 0, "micro_batch": 2}),
    "uneven by division": (LLAMA, 60, {"tp": 2, "pp": 6, "global_batch": 60, "dtype": "fp8"}),
    "uneven by choice": (LLAMA, 128, {"tp": 8, "pp": 16, "stage_layers": ENDS}),
    "v-shaped": (LLAMA, 16, {"tp": 8, "pp": 2, "schedule": "zb-v", "chunks": 2}),
    "zero bubble": (LLAMA, 64, {"tp": 8, "pp": 8, "schedule": "zb-h1"}),
    "experts": (MIXTRAL, 64, {"ep": 8, "tp": 2}),
    "latent": (DEEPSEEK, 512, {"ep": 32, "global_batch": 1024}),
    "recipe 16": (SMALL, 8, {"tp": 2, "recipe": 16, "fused_attention": False}),
    "gpt-j": (model("gpt-j-6b"), 8, {"tp": 2}),
    "gpt": (GPT, 64, {"tp": 8, "pp": 8, "schedule": "gpipe"}),
    "fp32": (SMALL, 12, {"tp": 2, "pp": 3, "dtype": "fp32"}),
    "one GPU": (SMALL, 1, {"dtype": "fp16", "global_batch": 4}),
}
KINDS = {"int": int, "float": float, "str": str, "bool": bool, "list": list}


def plan(case: str) -> tuple[Model, Configuration]:
    of, gpus, settings = PLANS[case]
    return of, configure(of, gpus, **settings)


def written(target: str, case: str) -> str:
    of, configuration = plan(case)
    return emit(target, of, hardware("h100"), configuration).text


def check(name: str, value: Any, allowed: Any) -> None:
    """``allowed`` is a type by name, or the list of choices."""
    if isinstance(allowed, list):
        assert value in allowed, f"{name}: {value!r} is none of {allowed}"
    else:
        kind = KINDS[allowed]
        assert isinstance(value, kind) or (kind is float and type(value) is int), name


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def megatron(case: str) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return the environment, torchrun's options and Megatron's."""
    words = [word for word in shlex.split(written("megatron", case), comments=True) if word.strip()]
    first, script = words.index("torchrun"), words.index("pretrain_gpt.py")
    environment = dict(word.split("=") for word in words[:first])
    return environment, pairs(words[first + 1 : script]), pairs(words[script + 1 :])


def pairs(words: list[str]) -> dict[str, str]:
    """Return the value of each option; "" for a flag."""
    found: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            assert word not in found, f"{word} comes twice"
            name, found[word] = word, ""
        else:
            assert not found[name], f"{name} has two values"
            found[name] = word
    return found


@pytest.mark.parametrize("case", PLANS)
def test_megatron(case):
    _, configuration = plan(case)
    environment, start, given = megatron(case)
    listed = options("megatron").options
    for name, value in given.items():
        allowed = listed[name]
        if allowed == "flag":
            assert value == "", f"{name} takes no value"
        elif isinstance(allowed, list):
            check(name, value, allowed)
        else:
            KINDS[allowed](value)  # "8" is an int
            assert value
    gpus = int(start.get("--nnodes", 1)) * int(start["--nproc-per-node"])
    assert gpus == configuration.world
    degrees = ("tensor-model", "pipeline-model", "context")
    product = configuration.dp
    for axis in degrees:
        product *= int(given[f"--{axis}-parallel-size"])
    assert product == gpus
    per_step = configuration.dp * int(given["--micro-batch-size"])
    assert int(given["--global-batch-size"]) == per_step * configuration.micro_batches
    # The parser asserts these two.
    ordered = environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    if "--use-megatron-fsdp" in given:
        assert not ordered
        assert given["--ckpt-format"] == "fsdp_dtensor"
    else:
        assert ordered == (configuration.tp * configuration.cp > 1)


def test_megatron_layout_has_all_layers():
    *_, given = megatron("uneven by choice")
    stages = given["--pipeline-model-parallel-layout"].split("|")
    assert [stage.count("t") for stage in stages] == list(ENDS)
    assert stages[0][0] == "E"
    assert stages[-1][-1] == "L"


@pytest.mark.parametrize("case", PLANS)
def test_torchtitan(case):
    of, configuration = plan(case)
    config = tomllib.loads(written("torchtitan", case))
    listed = options("torchtitan").options
    for name, value in flat(config):
        check(name, value, listed[name])
    parallel, training = config["parallelism"], config["training"]
    dp = parallel["data_parallel_replicate_degree"] * parallel["data_parallel_shard_degree"]
    product = dp
    for axis in ("tensor", "context", "pipeline"):
        product *= parallel[f"{axis}_parallel_degree"]
    assert (dp, product) == (configuration.dp, configuration.world)
    local = training["local_batch_size"]
    accumulated, rest = divmod(training["global_batch_size"], local * dp)
    assert rest == 0
    micro = parallel.get("pipeline_parallel_microbatch_size", local)
    assert accumulated * local // micro == configuration.micro_batches
    if configuration.pp > 1:
        assert stage_count(parallel, of.layers) == configuration.pp * configuration.chunks


def stage_count(parallel: Mapping[str, Any], layers: int) -> int:
    names = parallel.get("module_fqns_per_model_part")
    if names is None:
        return layers // parallel["pipeline_parallel_layers_per_stage"]
    in_order = [name for stage in names for name in stage]
    expected = [f"layers.{layer}" for layer in range(layers)]
    assert in_order == ["tok_embeddings", *expected, "norm", "output"]
    return len(names)


@pytest.mark.parametrize(("ffn", "hidden"), [(5632, 2048), (13824, 5120), (24, 16), (1001, 512)])
def test_torchtitan_rule_for_ffn(ffn, hidden):
    multiplier, multiple = _ffn_rule(ffn, hidden)
    inner = int(multiplier * int(2 * (4 * hidden) / 3))
    assert multiple * ((inner + multiple - 1) // multiple) == ffn


@pytest.mark.parametrize("case", PLANS)
def test_deepspeed(case):
    _, configuration = plan(case)
    config = json.loads(written("deepspeed", case))
    listed = options("deepspeed").options
    for name, value in flat(config):
        check(name, value, listed[name])
    micro = config["train_micro_batch_size_per_gpu"]
    per_step = micro * config["gradient_accumulation_steps"] * configuration.dp
    assert per_step == configuration.global_batch
    assert config.get("train_batch_size", per_step) == per_step
    assert ("train_batch_size" in config) == (configuration.tp == 1)
    assert config["zero_optimization"]["stage"] <= (3 if configuration.pp == 1 else 1)
    if config["zero_optimization"]["stage"] == 0 and "bf16" in config:
        assert config["data_types"]["grad_accum_dtype"] == "bf16"


@pytest.mark.parametrize("case", PLANS)
def test_fsdp2(case):
    of, configuration = plan(case)
    tree = ast.parse(written("fsdp2", case))
    modules = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or node.names[0].name]
    ]
    assert {name.split(".")[0] for name in modules} == {"contextlib", "os", "sys", "torch"}
    value = constants(tree)
    assert value["TP"] * value["REPLICATE"] * value["SHARD"] == configuration.tp * configuration.dp
    assert value["LAYERS"] == of.layers
    micro_batches = value["GLOBAL_BATCH"] // (configuration.dp * value["MICRO_BATCH"])
    assert micro_batches == configuration.micro_batches


def constants(tree: ast.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names, values = node.targets[0], node.value
            names_list = names.elts if isinstance(names, ast.Tuple) else [names]
            many = isinstance(names, ast.Tuple) and isinstance(values, ast.Tuple)
            for name, value in zip(names_list, values.elts if many else [values], strict=True):
                if isinstance(value, ast.Constant):
                    found[name.id] = value.value
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", PLANS)
def test_notes_are_in_the_text(target, case):
    of, configuration = plan(case)
    done = emit(target, of, hardware("h100"), configuration)
    words = " ".join(done.text.replace("#", " ").split())
    for note in done.notes:
        quoted = json.dumps(note)[1:-1] if target == "deepspeed" else note
        assert " ".join(quoted.split()) in words
    version = "2.13" if target == "fsdp2" else options(target).version
    assert version in done.text


@pytest.mark.parametrize(
    ("target", "case", "said"),
    [
        ("megatron", "zero bubble", "no schedule zb-h1"),
        ("megatron", "v-shaped", "it runs interleaved"),
        ("megatron", "zero-3", "Megatron-FSDP"),
        ("megatron", "gpt-j", "one norm"),
        ("megatron", "gpt-j", "only the linears of MLP have biases"),
        ("torchtitan", "zero-1", "no ZeRO-1"),
        ("torchtitan", "zero bubble", "no schedule zb-h1"),
        ("torchtitan", "gpt", "LayerNorm"),
        ("torchtitan", "experts", "no flavor"),
        ("deepspeed", "zero-2 with cp", "Ulysses"),
        ("deepspeed", "interleaved", "no schedule interleaved"),
        ("deepspeed", "zero-3", "AutoTP"),
        ("fsdp2", "interleaved", "leaves out pp 4"),
        ("fsdp2", "experts", "no experts"),
        ("fsdp2", "latent", "no latent attention"),
        ("fsdp2", "zero-2 with cp", "leaves out cp 2"),
    ],
)
def test_says_what_it_cannot_express(target, case, said):
    of, configuration = plan(case)
    assert any(said in note for note in emit(target, of, hardware("h100"), configuration).notes)


def test_zero_with_a_pipeline():
    configuration = configure(LLAMA, 64, tp=8, pp=4, zero=2)
    done = emit("deepspeed", LLAMA, hardware("h100"), configuration)
    assert json.loads(done.text)["zero_optimization"]["stage"] == 1
    assert any("refuses ZeRO-2 with a pipeline" in note for note in done.notes)


def test_unknown_target():
    with pytest.raises(ValueError, match="'nemo'; choose megatron, torchtitan, deepspeed or fsdp2"):
        emit("nemo", SMALL, hardware("h100"), Configuration())


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "deepspeed"])
def test_no_option_is_listed_for_nothing(target):
    """Every listed option is written by some plan, so that the list does not grow stale."""
    sources = {case: written(target, case) for case in PLANS}
    if target == "megatron":
        used = {name for case in PLANS for name in megatron(case)[2]}
    else:
        load = tomllib.loads if target == "torchtitan" else json.loads
        used = {name for text in sources.values() for name, _ in flat(load(text))}
    assert options(target).options.keys() == used
