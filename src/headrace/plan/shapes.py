"""Shapes of models by name, and the units that Headrace makes of such a model; sizes are those of published models."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.plan.subject import Attention, Subject
from headrace.schedule.build import ROWS, Visit
from headrace.spec.layout import Entry, place
from headrace.spec.model import BLOCK, REST, TILE, Matrix, ModelSpec, StateSpec, Unit, tile_rows

ADAMW = StateSpec(("exp_avg", "exp_avg_sq"))


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder with grouped attention and a gated MLP."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    like: str
    """The published model whose sizes these are; "" for none."""
    family: str = "llama"
    """What transformers calls models that are built so: llama, qwen2 or qwen3."""
    positions: int = 32768

    @property
    def biased(self) -> bool:
        """Queries, keys and values have a bias."""
        return self.family == "qwen2"

    @property
    def normed(self) -> bool:
        """Queries and keys have a norm."""
        return self.family == "qwen3"


SHAPES = {
    "tiny": Shape(256, 512, 4, 4, 2, 64, 4096, True, "", "qwen3"),
    "0.5b": Shape(896, 4864, 24, 14, 2, 64, 151936, True, "Qwen2.5-0.5B", "qwen2"),
    "1b": Shape(2048, 8192, 16, 32, 8, 64, 128256, True, "Llama-3.2-1B", positions=131072),
    "1.5b": Shape(1536, 8960, 28, 12, 2, 128, 151936, True, "Qwen2.5-1.5B", "qwen2"),
    "1.7b": Shape(2048, 6144, 28, 16, 8, 128, 151936, True, "Qwen3-1.7B", "qwen3"),
    "3b": Shape(3072, 8192, 28, 24, 8, 128, 128256, True, "Llama-3.2-3B", positions=131072),
    "4b": Shape(2560, 9728, 36, 32, 8, 128, 151936, True, "Qwen3-4B", "qwen3"),
    "7b": Shape(3584, 18944, 28, 28, 4, 128, 152064, False, "Qwen2.5-7B", "qwen2"),
    "8b": Shape(4096, 14336, 32, 32, 8, 128, 128256, False, "Llama-3.1-8B", positions=131072),
    "q8b": Shape(4096, 12288, 36, 32, 8, 128, 151936, False, "Qwen3-8B", "qwen3"),
    "14b": Shape(5120, 13824, 48, 40, 8, 128, 152064, False, "Qwen2.5-14B", "qwen2"),
    "24b": Shape(5120, 32768, 40, 32, 8, 128, 131072, False, "Mistral-Small-24B"),
    "32b": Shape(5120, 27648, 64, 40, 8, 128, 152064, False, "Qwen2.5-32B", "qwen2"),
    "70b": Shape(8192, 28672, 80, 64, 8, 128, 128256, False, "Llama-3.3-70B", positions=131072),
}

OTHER_NAMES = {"q1.5b": "1.5b", "q1.7b": "1.7b", "q4b": "4b", "q7b": "7b", "q14b": "14b", "l70b": "70b"}
"""Names of the same shapes in reports of measurements."""


def shape_named(name: str) -> Shape | None:
    """The shape that goes by a name, in small or capital letters."""
    name = name.lower()
    return SHAPES.get(OTHER_NAMES.get(name, name))


def subject_of(name: str, shape: Shape, dtype: str = "bfloat16") -> Subject:
    """The model with all weights trained by AdamW with fp32 moments, divided as Headrace divides it."""
    block = _block_entries("model.layers.0", shape, dtype)
    largest = sum(entry.numel for entry in block)
    units: list[Unit] = []
    matrices: list[Matrix] = []

    def add_matrix(matrix: str) -> tuple[int, ...]:
        rows, first = shape.vocabulary, len(units)
        each = tile_rows(rows, rows * shape.hidden / largest)
        for start in range(0, rows, each):
            count = min(each, rows - start)
            entry = Entry(matrix, (count, shape.hidden), dtype, True, 0, start)
            units.append(Unit(len(units), f"{matrix}[{start}:{start + count}]", TILE, place([entry]), ADAMW))
        matrices.append(Matrix(matrix, rows, shape.hidden, dtype, tuple(range(first, len(units)))))
        return matrices[-1].tiles

    head = add_matrix("model.embed_tokens.weight")
    visits = [Visit(0, ROWS)]
    for number in range(shape.layers):
        unit = f"model.layers.{number}"
        visits.append(Visit(len(units)))
        units.append(Unit(len(units), unit, BLOCK, place(_block_entries(unit, shape, dtype)), ADAMW))
    if not shape.tied:
        head = add_matrix("lm_head.weight")
    norm = place([Entry("model.norm.weight", (shape.hidden,), dtype, True, 0)])
    units.append(Unit(len(units), "rest", REST, norm, ADAMW, wide_grads=True))
    visits += [Visit(tile, TILE) for tile in head]
    attention = Attention(shape.heads, shape.kv_heads, shape.head_dim)
    spec = ModelSpec(tuple(units), tuple(matrices))
    return Subject(name, spec, tuple(visits), shape.hidden, attention, dtype=dtype, positions=shape.positions)


def _block_entries(prefix: str, shape: Shape, dtype: str) -> list[Entry]:
    """In the order in which transformers' decoder layers register them."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {}
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        sizes[f"self_attn.{name}_proj.weight"] = (rows, shape.hidden)
        if shape.biased:
            sizes[f"self_attn.{name}_proj.bias"] = (rows,)
    sizes["self_attn.o_proj.weight"] = (shape.hidden, queries)
    if shape.normed:
        sizes |= {f"self_attn.{name}_norm.weight": (shape.head_dim,) for name in ("q", "k")}
    sizes |= {f"mlp.{name}_proj.weight": (shape.mlp, shape.hidden) for name in ("gate", "up")}
    sizes["mlp.down_proj.weight"] = (shape.hidden, shape.mlp)
    sizes |= {f"{name}_layernorm.weight": (shape.hidden,) for name in ("input", "post_attention")}
    return [Entry(f"{prefix}.{name}", size, dtype, True, 0) for name, size in sizes.items()]
