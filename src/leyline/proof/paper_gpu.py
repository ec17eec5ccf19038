"""A model on paper: what a forward pass, a re-prefill and a splice cost on a given machine.

Time is what the slower of arithmetic and memory takes, at an assumed share of the published peak.
Nothing here is measured; `paper_table.py` compares the same formulas with what was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Way = Literal["move", "copy"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peaks of one device. bytes_s: of its memory; reads and writes both count. flops_s,
    flops8_s: dense, multiply and add counted as two, in 16 and in 8 bits."""

    name: str
    bytes_s: float
    flops_s: float
    flops8_s: float


H100 = Gpu("H100 SXM", 3.35e12, 989.5e12, 1979e12)
H200 = Gpu("H200 SXM", 4.8e12, 989.5e12, 1979e12)
"""Vendor's data sheets: H100 SXM has 3.35 TB/s, H200 SXM 4.8 TB/s; both 1979 TFLOP/s in bf16 and
3958 in fp8 with sparsity, half of that without."""


class Attention(Protocol):
    """How one layer reads cached rows."""

    @property
    def row(self) -> int:
        """Elements of a cached row."""

    @property
    def rotary(self) -> int:
        """Those of them that a move turns."""

    def flops(self, heads: int, reads: int, before: int) -> float:
        """Of one layer. reads: rows read, summed over the queries. before: rows that were cached
        before the pass."""


@dataclass(frozen=True, slots=True)
class Latent:
    """MLA: a row is a latent and one rotary key, for all heads."""

    latent: int = 512
    rotary: int = 64
    nope: int = 128
    value: int = 128

    @property
    def row(self) -> int:
        return self.latent + self.rotary

    def flops(self, heads: int, reads: int, before: int) -> float:
        """The cheaper of two ways: heads expanded from the latents (those of the pass itself are
        part of its linear layers), or attention on the latents themselves."""
        expanded = 2 * heads * (self.nope + self.rotary + self.value) * reads
        expanded += 2 * self.latent * heads * (self.nope + self.value) * before
        absorbed = 2 * heads * (self.latent + self.rotary + self.latent) * reads
        return float(min(expanded, absorbed))


@dataclass(frozen=True, slots=True)
class Grouped:
    """GQA: a row is a key and a value for each group of heads; whole keys turn."""

    groups: int
    width: int

    @property
    def row(self) -> int:
        return 2 * self.groups * self.width

    @property
    def rotary(self) -> int:
        return self.groups * self.width

    def flops(self, heads: int, reads: int, before: int) -> float:
        return float(2 * heads * 2 * self.width * reads)


@dataclass(frozen=True, slots=True)
class Model:
    """Parameters and rows of a model.

    linear: parameters that every token passes, in all layers: without embedding and head, with
    `chosen` of each layer's routed experts. head: of the output layer, which the last token passes.
    routed: parameters of all routed experts, of which a token passes `chosen` / `experts`.
    weight_bytes, row_bytes: of one parameter, of one cached element.
    """

    name: str
    layers: int
    heads: int
    attention: Attention
    linear: float
    head: float
    routed: float = 0.0
    experts: int = 1
    chosen: int = 0
    weight_bytes: int = 2
    row_bytes: int = 2

    def weights_read(self, tokens: int) -> float:
        """Bytes of weights that a pass over `tokens` reads. Experts are taken as chosen at
        random, one token like another."""
        spread = self.chosen / self.experts
        touched = 1 - (1 - spread) ** tokens
        shared = self.linear - spread * self.routed
        return (shared + touched * self.routed + self.head) * self.weight_bytes


def deepseek_v2_lite() -> Model:
    """From its published config; bf16."""
    hidden, layers, heads = 2048, 27, 16
    attention = hidden * heads * 192 + hidden * 576 + 512 * heads * 256 + heads * 128 * hidden
    expert = 3 * hidden * 1408
    moe = (6 + 2) * expert + hidden * 64
    return Model(
        name="DeepSeek-V2-Lite",
        layers=layers,
        heads=heads,
        attention=Latent(),
        linear=layers * attention + 26 * moe + 3 * hidden * 10944,
        head=102400 * hidden,
        routed=26 * 64 * expert,
        experts=64,
        chosen=6,
    )


def deepseek_v3() -> Model:
    """From its published config; weights in fp8, as published, rows in bf16."""
    hidden, layers, heads = 7168, 61, 128
    queries = hidden * 1536 + 1536 * heads * 192
    attention = queries + hidden * 576 + 512 * heads * 256 + heads * 128 * hidden
    expert = 3 * hidden * 2048
    moe = (8 + 1) * expert + hidden * 256
    return Model(
        name="DeepSeek-V3",
        layers=layers,
        heads=heads,
        attention=Latent(),
        linear=layers * attention + 58 * moe + 3 * 3 * hidden * 18432,
        head=129280 * hidden,
        routed=58 * 256 * expert,
        experts=256,
        chosen=8,
        weight_bytes=1,
    )


@dataclass(frozen=True, slots=True)
class Where:
    """`count` GPUs that share each pass evenly and talk for free. MLA rows are on all of them, so
    rows are read and turned at the speed of one."""

    gpu: Gpu
    count: int = 1


@dataclass(frozen=True, slots=True)
class Assumed:
    """What no data sheet says.

    linear, attention: share of peak FLOP/s reached in linear layers and in attention. weights,
    rows: share of the memory's bandwidth reached when weights and cached rows are read, and when
    rows are moved or copied. host_s: of a splice, on the CPU. kernels, launch_s: kernels a layer,
    and seconds each takes to launch; a pass is never faster. chunk: most tokens in a pass.
    passes: that a splice with a replacement takes; SGLang runs the replacement apart.
    """

    linear: float = 0.5
    attention: float = 0.5
    weights: float = 0.7
    rows: float = 0.5
    host_s: float = 1e-3
    kernels: int = 15
    launch_s: float = 5e-6
    chunk: int = 8192
    passes: int = 2


@dataclass(frozen=True, slots=True)
class Edit:
    """Tokens: `span` at `start` of a `conversation` become `stub`, and `new` come behind it."""

    conversation: int
    start: int = 200
    span: int = 500
    stub: int = 20
    new: int = 50

    @property
    def kept(self) -> int:
        """Rows behind the span."""
        return self.conversation - self.start - self.span

    @property
    def prompt(self) -> int:
        return self.start + self.stub + self.kept + self.new


@dataclass(frozen=True, slots=True)
class Splice:
    """Seconds of a splice until the first token. rows: turned on the device."""

    host: float
    rows: float
    passes: float

    @property
    def total(self) -> float:
        return self.host + self.rows + self.passes


def reads(tokens: int, context: int) -> int:
    """Rows read by the last `tokens` of `context` tokens: each reads all up to itself."""
    return tokens * context - tokens * (tokens - 1) // 2


def pass_seconds(model: Model, where: Where, assumed: Assumed, tokens: int, context: int) -> float:
    """A forward pass over `tokens`, the last of `context`."""
    gpu = where.gpu
    flops_s = gpu.flops8_s if model.weight_bytes == 1 else gpu.flops_s
    arithmetic = 2 * model.linear * tokens / (flops_s * where.count * assumed.linear)
    memory = model.weights_read(tokens) / (gpu.bytes_s * where.count * assumed.weights)
    launches = model.layers * assumed.kernels * assumed.launch_s
    device = max(arithmetic, memory) + _attention(model, where, assumed, tokens, context)
    return max(device, launches)


def _attention(model: Model, where: Where, assumed: Assumed, tokens: int, context: int) -> float:
    layer = model.attention
    flops = layer.flops(model.heads, reads(tokens, context), context - tokens)
    arithmetic = model.layers * flops / (where.gpu.flops_s * where.count * assumed.attention)
    read = model.layers * context * layer.row * model.row_bytes
    return max(arithmetic, read / (where.gpu.bytes_s * assumed.weights))


def prefill_seconds(
    model: Model, where: Where, assumed: Assumed, tokens: int, shared: int = 0
) -> float:
    """A prompt of which the first `shared` tokens are cached, a chunk after the other."""
    ends = [*range(shared + assumed.chunk, tokens, assumed.chunk), tokens]
    starts = [shared, *ends[:-1]]
    return sum(
        pass_seconds(model, where, assumed, end - start, end)
        for start, end in zip(starts, ends, strict=True)
    )


def rows_seconds(model: Model, where: Where, assumed: Assumed, rows: int, way: Way) -> float:
    """Turn rows in place, or copy them whole, turned on the way: all is read and written once."""
    layer = model.attention
    elements = layer.rotary if way == "move" else layer.row
    moved = 2 * rows * model.layers * elements * model.row_bytes
    return moved / (where.gpu.bytes_s * assumed.rows)


def splice_seconds(
    model: Model, where: Where, assumed: Assumed, edit: Edit, way: Way = "move"
) -> Splice:
    """Until the first token: host, rows, and the passes over what is new."""
    if edit.stub and assumed.passes == 2:
        stub = pass_seconds(model, where, assumed, edit.stub, edit.start + edit.stub)
        passes = stub + pass_seconds(model, where, assumed, edit.new, edit.prompt)
    else:
        passes = pass_seconds(model, where, assumed, edit.stub + edit.new, edit.prompt)
    rows = rows_seconds(model, where, assumed, edit.kept, way)
    return Splice(assumed.host_s, rows, passes)
