"""Put the takeover into a model, and take it out again."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headrace.base.errors import OptionError
from headrace.base.units import parse_bytes
from headrace.checkpoint.export import save_pretrained as export
from headrace.executor.adapted_head import adapt
from headrace.executor.embedding import TakenEmbedding, whole
from headrace.executor.head import TakenHead
from headrace.executor.stream import Stream
from headrace.executor.taken import Taken, TakenBlock, TakenEmbeddingCall, TakenHeadCall
from headrace.loss.fused import fused_loss, is_causal_lm_loss
from headrace.model import stored_products
from headrace.model.compiled import Compiler
from headrace.model.lora import fuse
from headrace.model.norms import take_norms
from headrace.model.parked import WeightValue, watch_inputs
from headrace.model.side import hooked_parts
from headrace.model.units import Anatomy
from headrace.model.visit import Block
from headrace.session.adapters import copy_in_use, guard_adapters
from headrace.session.attention import Attention
from headrace.session.guard import attach, guard
from headrace.session.options import Options
from headrace.spec.codecs import codec_named
from headrace.spec.model import BLOCK
from headrace.spec.precision import STORED


def install(
    model: nn.Module, anatomy: Anatomy, stream: Stream, options: Options, undo: list[Callable[[], None]]
) -> list[Taken]:
    """Take over the calls of blocks, embeddings and heads; watch gradients; guard what would copy the model."""
    watch_inputs()
    taken: list[Taken] = []
    fuse(anatomy.blocks.values(), stream.device, stream.events, undo)
    wish = options.attention
    attention = None if wish is None else Attention(wish, model, stream.device, stream.events)
    compiler = Compiler(stream.device, stream.tell_once)
    places = _stored_products(anatomy, stream, options.products, undo)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(stream.device)
    for unit, module in anatomy.blocks.items():
        _plain_calls(module, stream)
        name, forward = stream.spec.units[unit].name, module.forward
        run, kept, again = compiler.compile(module) if options.compile else (forward, forward, forward)
        if attention is not None:
            run, kept, again = attention.around(run), attention.around(kept), attention.around(again)
        block = Block(unit, name, module, forward, run, kept, again, anatomy.of_unit(unit), list(anatomy.shared[unit]))
        block.products = places.get(unit, ())
        taken.append(TakenBlock(stream, block))
        for parameter in block.parameters:
            _mark(parameter, "_headrace_owner", type(module).__name__, undo)
    recomputes = not all(stream.placement.keeps(unit) for unit in anatomy.blocks)
    if recomputes:
        take_norms(model, list(anatomy.blocks.values()), undo)
    for matrix, embedding in anatomy.embeddings:
        taken.append(TakenEmbeddingCall(stream, TakenEmbedding(matrix, embedding, embedding.forward)))
    heads = [TakenHeadCall(stream, TakenHead(m, h), False) for m, h in anatomy.heads]
    _take_loss(model, heads, stream, undo)
    taken += heads
    for call in taken:
        call.install()
        undo.append(call.remove)
    names = dict.fromkeys(entry.name for _, _, entry in stream.spec.pieces() if entry.trainable)
    trained = [anatomy.parameters[name] for name in names]
    undo += [handle.remove for handle in stream.sink.watch(trained)]
    for matrix, parameter in anatomy.matrix_weights.items():
        _mark(parameter, "_headrace_tiled", True, undo)
        _mark(parameter, "_headrace_whole", functools.partial(whole, stream, matrix, parameter), undo)
    _guard(model, stream, recomputes, undo)
    return taken


def _stored_products(
    anatomy: Anatomy, stream: Stream, products: str, undo: list[Callable[[], None]]
) -> dict[int, stored_products.Places]:
    """By unit, the layers that multiply weights as they are stored. An event says of each format whether it is only
    stored so."""
    names = {id(parameter): name for name, parameter in anatomy.parameters.items()}
    places, left = dict[int, stored_products.Places](), Counter[str]()
    if products == STORED:
        for unit, module in anatomy.blocks.items():
            entries = stream.spec.units[unit].weights.entries
            places[unit] = stored_products.replace(module, entries, names, stream.device, left, undo)
    codecs = Counter(codec_named(entry.codec).name for _, _, entry in stream.spec.pieces() if entry.codec)
    stored_products.tell(codecs, sum(map(len, places.values())), left, products, stream.events)
    return places


def _blocks(stream: Stream) -> int:
    return sum(unit.kind == BLOCK for unit in stream.spec.units)


def _mark(parameter: nn.Parameter, name: str, value: object, undo: list[Callable[[], None]]) -> None:
    """What a parked weight must know of itself."""
    setattr(parameter, name, value)
    undo.append(functools.partial(parameter.__dict__.pop, name, None))


def _plain_calls(module: nn.Module, stream: Stream) -> None:
    """What the user put around a block's forward is replaced by what Headrace does: compilation, checkpointing."""
    if module._compiled_call_impl is not None:
        module._compiled_call_impl = None
        text = "blocks compiled before wrapping run uncompiled"
        stream.tell_once("compiled", "compile", text, blocks=_blocks(stream))
    _no_checkpointing(module, stream)


def _no_checkpointing(module: nn.Module, stream: Stream) -> None:
    if getattr(module, "gradient_checkpointing", False):
        module.gradient_checkpointing = False  # type: ignore[assignment]
        text = "gradient checkpointing is left to Headrace's recompute"
        stream.tell_once("checkpointing", "recompute", text, blocks=_blocks(stream))


def _has_hooks(block: nn.Module, stream: Stream) -> bool:
    """Whether hooks of the user's lie inside, which is told."""
    part = next(hooked_parts(block), None)
    if part is not None:
        text = f"hooks inside blocks ({part} of {type(block).__name__}) run in the forward and again in the recompute; "
        text += "a gradient of what they collect is refused"
        stream.tell_once("hooks inside", "hooks", text, modules=sum(1 for _ in hooked_parts(block)))
    return part is not None


def _take_loss(model: nn.Module, heads: list[TakenHeadCall], stream: Stream, undo: list[Callable[[], None]]) -> None:
    """The causal loss of a Hugging Face model is computed from the head's tiles, without logits."""
    holder: Any = next((part for part in model.modules() if hasattr(type(part), "loss_function")), model)
    original = getattr(holder, "loss_function", None)
    if original is None:
        return
    get_head = getattr(holder, "get_output_embeddings", None)
    output = copy_in_use(get_head()) if callable(get_head) else None
    adapted = output if hasattr(output, "lora_A") else None
    module = output if adapted is None else adapted.get_base_layer()
    head = next((call for call in heads if call.module is module), None)
    reason = "its head does not stream in tiles" if head is None else ""
    if not is_causal_lm_loss(original):
        reason = "its loss is not the causal one"
    elif adapted is not None:
        reason = reason or adapt(adapted, undo)
    if head is None or reason:
        stream.events.add("loss", f"the model's own loss runs on full logits: {reason}", heads=len(heads))
        return
    if adapted is not None:
        stream.events.add("loss", "the adapters on the head add to its tiles: the loss builds no logits",
                          adapters=len(adapted.lora_A))  # fmt: skip
    head.lazy = True

    def tell(reason: str) -> None:
        stream.tell_once("loss", "loss", f"the model's own loss runs on full logits: {reason}", heads=len(heads))

    replaced = torch.compiler.disable(fused_loss(original, head.loss, tell))
    before = holder.__dict__.get("_loss_function")
    holder.loss_function = replaced

    def restore() -> None:
        if before is None:
            holder.__dict__.pop("_loss_function", None)
        holder.loss_function = original if before is None else before

    undo.append(restore)


def _guard(model: nn.Module, stream: Stream, recomputes: bool, undo: list[Callable[[], None]]) -> None:
    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        owner(model).before_forward()
        stream.roots.enter(module, args, kwargs)
        for block in blocks:
            _no_checkpointing(block, stream)
        if untold and any(_has_hooks(block, stream) for block in blocks):
            untold.clear()

    blocks = [call.module for call in _taken_blocks(model)]
    untold = ["hooks"] if recomputes else []
    begin, end = torch.compiler.disable(begin), torch.compiler.disable(lambda *call: stream.roots.leave())
    undo.append(model.register_forward_pre_hook(begin, with_kwargs=True).remove)
    undo.append(model.register_forward_hook(end, always_call=True).remove)

    def plain_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, value in state.items():
            if isinstance(value, WeightValue):
                state[name] = value.plain()

    undo.append(model.register_state_dict_post_hook(plain_state).remove)
    attach(model, "zero_grad", lambda set_to_none=True: owner(model).zero_grad(), undo)
    guard(model, stream, undo)
    codecs = {entry.name: entry.codec for _, _, entry in stream.spec.pieces() if entry.codec is not None}
    guard_adapters(model, codecs, stream.events, undo)
    if hasattr(model, "save_pretrained") and not hasattr(model, "peft_config"):  # peft saves adapters itself
        attach(model, "save_pretrained", _saver(model), undo)


def _taken_blocks(model: nn.Module) -> list[TakenBlock]:
    return [call for module in model.modules() if isinstance(call := module.__dict__.get("forward"), TakenBlock)]


def owner(model: nn.Module) -> Any:
    """The session of a wrapped model (its class lies above this module)."""
    return model._headrace_session


def _saver(model: nn.Module) -> Callable[..., None]:
    def save_pretrained(
        save_directory: Any, is_main_process: bool = True, max_shard_size: int | str = "5GB", **others: Any
    ) -> None:
        """Stream the model to a folder in Hugging Face's format, block by block."""
        others.pop("safe_serialization", None)  # safetensors is the only format
        given = sorted(name for name, value in others.items() if value is not None and value is not False)
        if not str(save_directory):
            raise OptionError("save_pretrained was given no folder", "got ''", "Name the folder to write to")
        if given:
            raise OptionError(
                f"save_pretrained of a wrapped model cannot take {', '.join(given)}",
                "it writes the model's own weights",
                "Leave it out, or call headrace.unwrap(model) first",
            )  # fmt: skip
        if is_main_process:
            owner(model).wait()
            export(model, save_directory, owner(model).read_for_save, max_shard_bytes=parse_bytes(max_shard_size))

    return save_pretrained
