"""plan: memory, traffic, bubble and step time of a run, before any GPU is rented."""

from __future__ import annotations

from pathlib import Path
from re import fullmatch
from typing import TYPE_CHECKING, Annotated, Any

import typer

from course_lib.cli.app import AsJson, app
from course_lib.cli.show import print_json
from course_lib.cli.status import Status

if TYPE_CHECKING:
    from course_lib.planner import Configuration, Hardware, Model
    from course_lib.planner.result import Estimate

EXAMPLE = "course plan llama-3-70b --gpus 64 --hardware h100 --tp 8 --pp 4"
NEEDED = ("family", "layers", "hidden", "heads", "vocab")  # of a custom model
MOST_PLANS = 1000  # that --search lists in a minute or two
TRAINING = (
    "zero", "schedule", "chunks", "micro_batch", "global_batch", "seq", "recompute", "recipe",
    "fused_attention", "overlap_tp",
)  # fmt: skip
MOST_STAGES = 10_000  # that --stage-layers writes as one number

Degree = Annotated[int | None, typer.Option(help="GPUs on this axis; default: 1.")]
Count = Annotated[int | None, typer.Option(help="Of a custom model.")]


@app.command()
def plan(
    model: Annotated[
        str | None, typer.Argument(help="A name of the catalog, or custom; a wrong one lists all.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs.")] = None,
    hardware: Annotated[str | None, typer.Option(help="h100, say; a wrong name lists all.")] = None,
    tp: Degree = None,
    pp: Degree = None,
    cp: Degree = None,
    dp: Annotated[int | None, typer.Option(help="Default: GPUs / (tp x cp x pp).")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert parallel, a divisor of dp x cp.")] = None,
    zero: Annotated[int | None, typer.Option(help="0 to 3; default: 1 if dp x cp > 1.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Default: interleaved if --chunks > 1, else 1f1b.")
    ] = None,
    chunks: Annotated[int | None, typer.Option(help="Stages per pipeline rank.")] = None,
    stage_layers: Annotated[
        str | None, typer.Option(help="Layers per stage where they are uneven: 7,8x14,7.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences per micro-batch; default: 1.")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Sequences per step; default: about 4 Mi tokens.")
    ] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    recompute: Annotated[
        str | None, typer.Option(help="none, selective or full; default: none.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp8, fp32 or fp64.")] = "bf16",
    recipe: Annotated[
        int | None, typer.Option(help="Bytes per parameter of training: 16, 18 (default) or 20.")
    ] = None,
    fused_attention: Annotated[
        bool | None,
        typer.Option(
            "--fused-attention/--plain-attention", help="Default: fused, which saves no scores."
        ),
    ] = None,
    overlap_tp: Annotated[
        bool | None, typer.Option("--overlap-tp", help="Kernels hide TP behind the products.")
    ] = None,
    generation: Annotated[
        str | None, typer.Option(help="Year of the software, for its efficiency.")
    ] = None,
    reserve: Annotated[
        float | None, typer.Option(help="Share of memory that stays free; default: 0.08, for NCCL.")
    ] = None,
    family: Annotated[str | None, typer.Option(help="Of a custom model: gpt or llama.")] = None,
    layers: Count = None,
    hidden: Count = None,
    heads: Count = None,
    kv_heads: Count = None,
    ffn: Count = None,
    experts: Count = None,
    top_k: Annotated[int | None, typer.Option(help="Of a custom model: experts per token.")] = None,
    vocab: Count = None,
    calibrate: Annotated[
        Path | None, typer.Option(help='A TOML file: node.bandwidth = "370 GB/s".')
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Derive the numbers, as on a whiteboard.")
    ] = False,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(help="Two plans A and B, such as tp=8,pp=4 tp=4,zero=3.", metavar="A B"),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Rank all legal plans by step time.")
    ] = False,
    top: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_PLANS, help="Plans that --search lists; default: 10."),
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Plan inference.")] = False,
    batch: Annotated[
        int | None, typer.Option(help="With --serve: requests at once per replica; default: 1.")
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(help="With --serve: tokens per prompt; default: 1,024.")
    ] = None,
    generate: Annotated[
        int | None, typer.Option(help="With --serve: tokens to generate; default: 256.")
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(help="Write the plan for megatron, torchtitan, deepspeed or fsdp2."),
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Compare published runs with ours; no model.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Plan a run: memory, traffic, bubble, step time, MFU; or search for the best plan."""
    from course_lib.planner import configure
    from course_lib.planner.calibrate import calibrated
    from course_lib.planner.hardware import hardware as hardware_of

    if published:
        others = [model, None if gpus is None else "--gpus", hardware and "--hardware"]
        if found := [one for one in others if one is not None]:
            raise ValueError(f"--published plans runs of its own; leave out {', '.join(found)}")
        return _published(as_json)
    sizes = {
        "family": family,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "experts": experts,
        "top_k": top_k,
        "vocab": vocab,
    }
    given = _model(model, {name: size for name, size in sizes.items() if size is not None})
    if gpus is None:
        raise ValueError(
            f"expected --gpus with the number of GPUs, got none; for example: {EXAMPLE}"
        )
    machine = hardware_of((hardware or "").lower())
    if calibrate is not None:
        machine = calibrated(machine, calibrate)
    if reserve is not None and not 0 <= reserve < 1:
        raise ValueError(f"expected --reserve from 0 to below 1, a share, got {reserve}")
    arguments = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "dp": dp,
        "ep": ep,
        "zero": zero,
        "schedule": schedule,
        "chunks": chunks,
        "stage_layers": _stage_layers(stage_layers),
        "micro_batch": micro_batch,
        "global_batch": global_batch,
        "seq": seq,
        "recompute": recompute,
        "dtype": dtype,
        "recipe": recipe,
        "fused_attention": fused_attention,
        "overlap_tp": overlap_tp or None,
    }
    degrees: dict[str, Any] = {
        name: value for name, value in arguments.items() if value is not None
    }
    options = {
        name: value
        for name, value in {"reserve": reserve, "generation": generation}.items()
        if value is not None
    }
    modes = {
        "explain": explain,
        "compare": compare,
        "search": search,
        "serve": serve,
        "emit": emit is not None,
    }
    chosen = [f"--{name}" for name, on in modes.items() if on]
    if len(chosen) > 1:
        raise ValueError(f"expected one of {', '.join(chosen)} at a time; leave the others out")
    requests = {"batch": batch, "prompt": prompt, "generate": generate}
    if not serve and any(size is not None for size in requests.values()):
        raise ValueError("--batch, --prompt and --generate describe inference; add --serve")
    training = [f"--{name.replace('_', '-')}" for name in TRAINING if name in degrees]
    if serve and training:
        raise ValueError(f"--serve plans inference; leave out {', '.join(training)}, of training")
    if top is not None and not search:
        raise ValueError("--top is the number of plans that --search lists; add --search")
    if compare:
        return _compare(given, machine, gpus, degrees, compare, options, as_json)
    if search:
        return _search(given, machine, gpus, degrees, top or 10, options, as_json)
    made = configure(given, gpus, **degrees)
    if emit is not None:
        return _emit(given, machine, made, emit, as_json)
    if serve:
        return _serve(given, machine, made, requests, options, as_json)
    return _plan(given, machine, made, explain, options, as_json)


def _plan(
    model: Model,
    machine: Hardware,
    made: Configuration,
    explain: bool,
    options: dict[str, Any],
    as_json: bool,
) -> int:
    """Print the estimate of one plan, or its derivation."""
    from course_lib.planner.compare import sensitivity
    from course_lib.planner.estimate import estimate
    from course_lib.planner.explain import derivation
    from course_lib.planner.text import report

    found = estimate(model, machine, made, **options)
    lines = derivation(found, options.get("generation")) if explain else []
    if as_json:
        extra = {"explanation": lines} if explain else {}
        changes = sensitivity(model, machine, made, **options)
        print_json({**found.as_dict(), "sensitivity": changes, **extra})
    elif explain:
        print("\n".join(lines))
    else:
        print(report(found, sensitivity(model, machine, made, **options)))
    return 0


def _compare(
    model: Model,
    machine: Hardware,
    gpus: int,
    degrees: dict[str, Any],
    texts: tuple[str, str],
    options: dict[str, Any],
    as_json: bool,
) -> int:
    """Print two plans beside each other; each may override the other options."""
    from course_lib.planner import configure
    from course_lib.planner.compare import compare, read_plan
    from course_lib.planner.estimate import estimate
    from course_lib.planner.hardware import hardware
    from course_lib.planner.text import comparison

    def one(text: str) -> Estimate:
        own = read_plan(text)
        where = hardware(own.pop("hardware").lower()) if "hardware" in own else machine
        made = configure(model, own.pop("gpus", gpus), **{**degrees, **own})
        return estimate(model, where, made, **options)

    a, b = map(one, texts)
    result = compare(a, b)
    if as_json:
        print_json({"a": a.as_dict(), "b": b.as_dict(), **result.as_dict()})
    else:
        print(comparison(a, b, result))
    return 0


def _search(
    model: Model,
    machine: Hardware,
    gpus: int,
    degrees: dict[str, Any],
    top: int,
    options: dict[str, Any],
    as_json: bool,
) -> int:
    """Print the best plans. Options that were given restrict the search."""
    from course_lib.planner.search import search
    from course_lib.planner.text import ranking

    with Status("searching"):
        found = search(model, machine, gpus, top=top, **options, **degrees)
    if as_json:
        print_json(found.as_dict())
    else:
        print(ranking(found))
    return 0


def _serve(
    model: Model,
    machine: Hardware,
    made: Configuration,
    requests: dict[str, int | None],
    options: dict[str, Any],
    as_json: bool,
) -> int:
    """Print the plan of inference."""
    from course_lib.planner.serve import serve
    from course_lib.planner.text import serving

    sizes: dict[str, Any] = {k: size for k, size in requests.items() if size is not None}
    found = serve(model, machine, made, **options, **sizes)
    if as_json:
        print_json(found.as_dict())
    else:
        print(serving(found))
    return 0


def _emit(model: Model, machine: Hardware, made: Configuration, target: str, as_json: bool) -> int:
    """Print the plan in the words of a framework."""
    from course_lib.planner.emit import emit

    found = emit(target, model, machine, made)
    if as_json:
        print_json(
            {"target": target, "suffix": found.suffix, "text": found.text, "notes": found.notes}
        )
    else:
        print(found.text, end="")
    return 0


def _published(as_json: bool) -> int:
    """Print published values beside the planner's, as Markdown."""
    from course_lib.planner.published import results, table

    with Status("planning the published runs"):
        found = results()
    if as_json:
        print_json(
            [
                {
                    "run": one.row.run,
                    "quantity": one.row.quantity,
                    "unit": one.row.unit,
                    "published": one.row.value,
                    "ours": one.ours,
                    "error": one.error,
                    "held": one.held,
                    "calibration": one.row.calibration,
                    "source": one.row.source,
                }
                for one in found
            ]
        )
    else:
        print(table(found), end="")
    return 0


def _model(name: str | None, sizes: dict[str, Any]) -> Model:
    """Return the model of the catalog, or the one of the given ``sizes``."""
    from course_lib.planner import custom_model, model, models

    if name is None:
        raise ValueError(
            f"expected a model, got none; choose {', '.join(models())} or custom: {EXAMPLE}"
        )
    options = " and ".join(f"--{size.replace('_', '-')}" for size in sizes)
    if name.lower() != "custom":
        found = model(name.lower())
        if sizes:
            raise ValueError(f"{name} has sizes of its own; leave out {options}, or plan custom")
        return found
    if "top_k" in sizes and not sizes.get("experts"):
        raise ValueError("--top-k counts the experts per token; add --experts, or leave it out")
    missing = [f"--{size}" for size in NEEDED if size not in sizes]
    if missing:
        raise ValueError(f"a custom model needs {', '.join(missing)} too")
    return custom_model(sizes.pop("family"), **sizes)


def _stage_layers(text: str | None) -> tuple[int, ...] | None:
    """Return the counts of ``7,8x14,7``: 7, then 14 stages of 8, then 7."""
    if text is None:
        return None
    found: list[int] = []
    for piece in text.split(","):
        part = fullmatch(r"\s*(\d{1,9})(?:x([1-9]\d{0,99}))?\s*", piece)
        if part is None:
            raise ValueError(
                f"expected layers per stage such as 7,8x14,7, got --stage-layers {text!r}"
            )
        found += [int(part[1])] * min(int(part[2] or 1), MOST_STAGES)
    return tuple(found)
