"""The plan as a script of plain PyTorch: FSDP2 over dp, DTensor over tp."""

from __future__ import annotations

from pathlib import Path
from string import Template
from textwrap import fill

from course_lib.planner.catalog import Model
from course_lib.planner.configuration import Configuration
from course_lib.planner.emit.emitted import (
    Emitted,
    biases,
    departures,
    learned_positions,
    title,
    torchrun,
)
from course_lib.planner.hardware import Hardware

VERSION = "2.13"
# number format of the plan -> stored, computed
DTYPES = {
    "fp64": ("torch.float64", "torch.float64"),
    "fp32": ("torch.float32", "torch.float32"),
    "bf16": ("torch.float32", "torch.bfloat16"),
}
MLP = """class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc_in = nn.Linear(HIDDEN, FFN, bias={bias})
        self.fc_out = nn.Linear(FFN, HIDDEN, bias={bias})

    def forward(self, x):
        return self.fc_out(F.gelu(self.fc_in(x)))
"""
SWIGLU = """class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, FFN, bias={bias})
        self.up = nn.Linear(HIDDEN, FFN, bias={bias})
        self.down = nn.Linear(FFN, HIDDEN, bias={bias})

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))
"""
ROPE = """        options = {"device": x.device, "dtype": STORED}
        pairs = torch.arange(0, HEAD_DIM, 2, **options) / HEAD_DIM
        angles = torch.arange(q.shape[1], **options)[:, None] * ROPE_BASE**-pairs
        q, k = rotate(q, angles), rotate(k, angles)
"""
COUNT = "POSITIONS = {}  # of the table of learned positions\n"
TABLE = "        self.embedding.position = nn.Embedding(POSITIONS, HIDDEN)\n"
SUM = """        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = x + self.embedding.position(positions)
"""
PLAN = """            "embedding.position": RowwiseParallel(
                input_layouts=full, output_layouts=Shard(0)
            ),
"""
TIE = "    model.head.weight = model.embedding.token.weight\n"


def write(model: Model, hardware: Hardware, configuration: Configuration) -> Emitted:
    """Return a script. Ranks are in the order of the planner: tp, dp, tp fastest."""
    notes = _notes(model, configuration)
    swiglu, learned = model.family == "llama", learned_positions(model)
    attention_bias, mlp_bias = biases(model)
    stored, compute = DTYPES.get(configuration.dtype.name, DTYPES["bf16"])
    ranks = Configuration(tp=configuration.tp, dp=configuration.dp)
    template = Path(__file__).with_name("fsdp2_page.txt").read_text(encoding="utf-8")
    text = Template(template).substitute(
        title=title(model, hardware, configuration),
        origin=f"Plain PyTorch {VERSION}: FSDP2 and DTensor.",
        launch=torchrun(hardware, ranks),
        limits="".join(f"\n{fill(note, 96)}\n" for note in notes),
        vocab=model.vocab,
        layers=model.layers,
        hidden=model.hidden,
        ffn=model.ffn,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        tp=configuration.tp,
        replicate=configuration.dp if configuration.zero == 0 else 1,
        shard=1 if configuration.zero == 0 else configuration.dp,
        zero=configuration.zero,
        recompute=configuration.recompute == "full",
        micro_batch=configuration.micro_batch,
        global_batch=configuration.global_batch,
        seq=configuration.seq,
        stored=stored,
        compute=compute,
        bias=attention_bias,
        norm="RMSNorm" if swiglu else "LayerNorm",
        mlp=(SWIGLU if swiglu else MLP).format(bias=mlp_bias),
        columns='"gate", "up"' if swiglu else '"fc_in",',
        row="down" if swiglu else "fc_out",
        rope="" if learned else ROPE,
        positions=COUNT.format(max(model.max_seq_len, configuration.seq)) if learned else "",
        position_table=TABLE if learned else "",
        position_sum=SUM if learned else "",
        position_plan=PLAN if learned else "",
        tie=TIE if model.tied else "",
    )
    return Emitted(text, tuple(notes), ".py")


def _notes(model: Model, configuration: Configuration) -> list[str]:
    notes = [f"This page leaves out: {one}." for one in departures(model)]
    others = {axis: getattr(configuration, axis) for axis in ("cp", "pp", "ep")}
    left_out = [f"{axis} {size}" for axis, size in others.items() if size > 1]
    if left_out:
        ranks = configuration.tp * configuration.dp
        notes.append(
            f"This page has tp and dp only, so it runs on {ranks} of the plan's "
            f"{configuration.world} GPUs; it leaves out {', '.join(left_out)}."
        )
    if model.experts is not None:
        notes.append("This page has an MLP in every layer, no experts.")
    if model.latent is not None:
        notes.append("This page has plain attention, no latent attention.")
    if model.dropout:
        notes.append(f"This page has no dropout ({model.dropout:g} in the model).")
    if configuration.tp > 1 and model.kv_heads % configuration.tp:
        notes.append(f"DTensor needs tp to divide the KV heads, {model.kv_heads} here.")
    if configuration.tp > 1 and configuration.seq % configuration.tp:
        notes.append(f"Sequence parallelism needs tp to divide {configuration.seq} positions.")
    rows = {"vocabulary": model.vocab, "K": model.kv_heads * model.head_dim, "ffn": model.ffn}
    shards = configuration.tp * (configuration.dp if configuration.zero else 1)
    uneven = [f"{name} ({size})" for name, size in rows.items() if size % shards]
    if configuration.tp > 1 and shards > configuration.tp and uneven:
        notes.append(
            f"tp x dp = {shards} does not divide the rows of {', '.join(uneven)}: torch trains "
            "such shards but fills them from no whole state dict. Read a distributed checkpoint "
            "with dcp.load instead of weights.pt."
        )
    if configuration.zero == 1 and configuration.dp > 1:
        notes.append(
            "FSDP2 has no ZeRO-1. This page gathers the weights once per step and reduces the "
            "gradients once per step; between steps the weights are sharded too."
        )
    if configuration.zero == 2 and configuration.dp > 1:
        notes.append("FSDP2 has no ZeRO-2. This page gathers the weights once per micro-batch.")
    if configuration.recompute == "selective":
        notes.append(
            "scaled_dot_product_attention computes its scores again in backward, so this page "
            "needs no selective recomputation."
        )
    if configuration.dtype.name not in DTYPES:
        notes.append(f"This page computes in bfloat16, not {configuration.dtype.name}.")
    if configuration.dtype.name in ("bf16", "fp16", "fp8"):
        notes.append(
            "Weights, gradients and moments are stored in fp32 (16 bytes per parameter, sharded); "
            "gathered weights are bf16."
        )
    return notes
