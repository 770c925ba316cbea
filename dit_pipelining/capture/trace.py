"""Leaf-block tracing: record the glue of a model's forward while every block stays one opaque call.

[Note: how a forward is recorded]
The model's own forward runs once on fake tensors (shapes without data) under a `TorchFunctionMode`, which sees every call
of torch's Python API. Each call becomes one FX node that makes the very same call again: `F.layer_norm` stays
`F.layer_norm`, `x.chunk(2)` stays `x.chunk(2)`. So a replay runs the same kernels as the model does, and nothing is
decomposed. Blocks, and torch.nn modules with parameters (linears, norms, embeddings, and what replaces them: LoRA and
quantised layers), are single `call_module` nodes that refer to the original module.

Values are followed by identity. An operation that returns its argument (`to` with the same dtype, `contiguous` of a
contiguous tensor) leaves no node, and a block that returns one of its arguments unchanged adds none for it.

[Note: writes in place]
A node that writes into a tensor is ordered by data flow: every tensor that shares its memory is afterwards known under a
new node that depends on the write (`written`). The node's `meta["writes"]` holds the nodes that read that memory before:
the write must not run on an earlier stage than they do. A write into one of the caller's inputs would happen once per
stage, so the trace starts again with a copy of that tensor taken first; a write into a parameter or buffer is refused.

[Note: values]
A question about values is answered from the real inputs and kept with the graph, see [Note: questions] in values.py.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dit_pipelining.capture import replay
from dit_pipelining.capture.functions import is_plain_property, is_random, name_of, no_other_randomness, sets_data
from dit_pipelining.capture.model_line import model_line
from dit_pipelining.capture.module_hooks import glue_modules, has_hooks, hooked_within, without_hooks
from dit_pipelining.capture.opaque import is_opaque, weights_within
from dit_pipelining.capture.placing import object_layouts, place_inputs, refuse_aliases, refuse_filled_containers
from dit_pipelining.capture.quantised import is_quantised_linear, like_quantised_linear
from dit_pipelining.capture.record import Record, WritesIntoInputError
from dit_pipelining.capture.sandbox import (
    CAPTURE_LOCK,
    collected_lora_scales,
    exchanged_tensors,
    intercepted_calls,
    intercepted_function,
)
from dit_pipelining.capture.signature import CallInputs, object_state, objects_in, rebuild_inputs
from dit_pipelining.capture.structure import copies_of_given, hands_through, tensors_in
from dit_pipelining.capture.values import ValueNeededError, Values
from dit_pipelining.errors import CaptureError, ConfigError
from dit_pipelining.torch_internals import NEEDS_VALUES, real_tensors, version, without_gathering


class Tracer(TorchFunctionMode):
    """Sees every call of torch's API and of modules while the model's forward runs, and records it. Use `trace`."""

    def __init__(self, record: Record, blocks: Iterable[str]) -> None:
        super().__init__()
        self.record = record
        self.model = model = record.model
        self.blocks = {id(model.get_submodule(name)): name for name in blocks}
        self.modules = {id(module): name for name, module in reversed(list(model.named_modules()))}
        # See [Note: hooks of modules] in module_hooks.py.
        glue = (module for name, module in glue_modules(model, frozenset(blocks)) if name)
        self.hooked = {id(m) for m in glue if has_hooks(m) or (is_opaque(m) and hooked_within(m))}
        self.opaque = {id(m) for m in model.modules() if id(m) in self.blocks or is_opaque(m)} | self.hooked
        self.quantised = {id(m) for m in model.modules() if is_quantised_linear(m)}
        self.object_states: dict[int, Any] = {}
        self.values = Values(record)
        self.inside_opaque = False

    # ---- the run ------------------------------------------------------------------------------------------------------

    def run(self, forward: Callable[..., Any], copied: frozenset[str]) -> None:
        """Run the forward, on copies of the inputs at these paths."""
        record, model = self.record, self.model
        with (
            exchanged_tensors(model, record.fake_weight) as record.names,
            without_gathering(model),
            without_hooks(model),
            intercepted_calls(self._call) as self.plain_call,
            collected_lora_scales(model) as scales,
            intercepted_function(model, "create_block_mask", self._create_block_mask),
            intercepted_function(model, "flex_attention", self._flex_attention),
            torch.inference_mode(False),
            torch.no_grad(),
            record.fake_mode,
            record.counter or nullcontext(),
        ):
            leaves = place_inputs(record, copied)
            kwargs = rebuild_inputs(record.inputs.kwargs, leaves)
            with self, no_other_randomness(model):
                result = forward(**kwargs)
            refuse_filled_containers(record, record.inputs.kwargs, kwargs)
            record.output = record.to_nodes(result, output=True)
            record.object_tensors = object_layouts(record, {path: leaves[path] for path in record.inputs.objects})
            record.mark_returned(result)
        record.lora_scale = scales[-1] if scales else 1.0

    # ---- one call of torch's API --------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside_opaque and is_random(func, kwargs):
            self.record.draws = self.record.draws or name_of(func)
        if self.inside_opaque or torch.compiler.is_compiling() or is_plain_property(func):
            return self._run(func, args, kwargs)
        if is_random(func, kwargs):
            raise CaptureError(
                f"the forward of {type(self.model).__name__} draws random numbers at {model_line()}. Ranks would draw "
                "different ones. If it is dropout, call model.eval() first; else draw them outside and pass them as an "
                "input."
            )
        if func is torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args, kwargs))
        versions = [(t, version(t)) for t in tensors_in((args, kwargs))]
        try:
            result = self._run(func, args, kwargs)
        except NEEDS_VALUES:
            result = self._answer(func, args, kwargs)
        except RuntimeError as error:  # .numpy() of a fake tensor, or np.asarray
            if name_of(func) not in ("numpy", "__array__"):
                raise
            result = self._answer(func, args, kwargs, cause=error)
        written = [tensor for tensor, before in versions if version(tensor) != before]
        if sets_data(func):
            written.append(args[0])
        fresh = any(id(t) not in self.record.nodes for t in tensors_in(result))
        if fresh or written:
            operation, call_args = replay.as_node_call(func, args)
            node = self.record.create(operation, call_args, kwargs)
            self.record.know_result(result, node, written)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.record.counter is not None and func is torch.nn.functional.scaled_dot_product_attention:
            return self.record.counter.run_attention(func, args, kwargs)
        return func(*args, **kwargs)

    # ---- one call of a module -----------------------------------------------------------------------------------------

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.inside_opaque or id(module) not in self.opaque:
            return self._run_module(module, args, kwargs)
        versions = [(t, version(t)) for t in tensors_in((args, kwargs))]
        name = self.modules[id(module)]
        if id(module) in self.hooked:
            self._refuse_hooked_chain(module, name)
            self.record.hooked[name] = frozenset(weights_within(name, module))
        self.record.skip_work()
        # As they are before the call changes them.
        node_arguments = self.record.to_nodes(args), self.record.to_nodes(kwargs)
        self._refuse_changed_objects((args, kwargs))
        self.inside_opaque = True
        try:
            result = self._run_module(module, args, kwargs)
        except NEEDS_VALUES:
            result = self._run_looking_at_values(module, args, kwargs)
        finally:
            self.inside_opaque = False
        if hands_through((args, kwargs), result):
            result = self._handed_through(module, (args, kwargs), result)
        self._remember_objects((args, kwargs))
        node = self.record.create(("call_module", name), *node_arguments)
        if id(module) in self.blocks:
            node.meta["block"] = name
        written = [tensor for tensor, before in versions if version(tensor) != before]
        self.record.know_result(result, node, written)
        return result

    def _run_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if id(module) in self.quantised:
            return like_quantised_linear(module, *args, **kwargs)
        return self.plain_call(module, *args, **kwargs)

    def _handed_through(self, module: nn.Module, arguments: Any, result: Any) -> Any:
        """The result of a module that gives some of its arguments back: a hook may have other values for them."""
        if id(module) in self.blocks:
            self.record.handing.add(self.blocks[id(module)])
        if id(module) not in self.hooked:
            return result
        self.inside_opaque = True
        try:
            return copies_of_given(arguments, result)
        finally:
            self.inside_opaque = False

    def _refuse_hooked_chain(self, module: nn.Module, name: str) -> None:
        if any(id(part) in self.blocks for part in module.modules()):
            raise ConfigError(
                f"{name!r} of {type(self.model).__name__} has a forward hook and contains blocks, which are on several ranks. "
                "Put the hook on the blocks, or on what is inside of them."
            )

    def _refuse_changed_objects(self, arguments: Any) -> None:
        """A block gets an object by reference, so what glue changes in it between two blocks would not be repeated."""
        for value in objects_in(arguments):
            before = self.object_states.get(id(value))
            if before is not None and before != object_state(value):
                raise CaptureError(
                    f"the forward of {type(self.model).__name__} changes a {type(value).__name__} between the blocks that it "
                    f"hands it to, at {model_line()}. Stages cannot repeat that; pass what changes as an argument."
                )
        self._remember_objects(arguments)

    def _remember_objects(self, arguments: Any) -> None:
        for value in objects_in(arguments):
            self.object_states[id(value)] = object_state(value)

    def _run_looking_at_values(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block whose inner code looks at values, to learn the shape of its output.

        Its inside is recorded for once, so that questions can be answered; nothing of that record is used.
        """
        self.inside_opaque = False
        self.opaque.remove(id(module))
        self.record.skip_work()
        counter = self.record.counter
        self.record.counter = None  # what is recorded of the inside takes no part of the block's work
        try:
            with self.values.stand_ins():
                result = self.plain_call(module, *args, **kwargs)
        finally:
            self.opaque.add(id(module))
            self.record.counter = counter
        given = {id(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if id(tensor) not in given:
                self.record.nodes.pop(id(tensor), None)
        return result

    def _create_block_mask(self, original: Callable[..., Any], mask_mod: Any, *args: Any, **kwargs: Any) -> Any:
        """Flex attention's masks are made by vmap over a Python function: run it on real values, record the result."""
        try:
            mask_mod = self.values.with_real_closure(mask_mod)
        except ValueNeededError as error:
            raise CaptureError(f"the block mask made at {model_line()} needs {error}.") from None
        self.inside_opaque = True
        try:
            with real_tensors():
                return original(mask_mod, *args, **kwargs)
        finally:
            self.inside_opaque = False

    def _flex_attention(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Inside a block dense attention stands in for flex attention, which torch has to compile before it runs.

        Of a block's inside only shapes and FLOPs leave the trace; the FLOPs are those of the unmasked attention.
        """
        if not (self.inside_opaque or self.values.standing_in):
            return original(*args, **kwargs)
        query, key, value = (
            kwargs[name] if name in kwargs else args[i] for i, name in enumerate(("query", "key", "value"))
        )
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, enable_gqa=key.shape[1] != query.shape[1]
        )
        if kwargs.get("return_lse"):
            return output, query.new_empty(query.shape[:-1], dtype=torch.float32)
        return output

    def _answer(self, func: Any, args: Any, kwargs: Any, cause: BaseException | None = None) -> Any:
        try:
            return self.values.answer(func, args, kwargs)
        except ValueNeededError as error:
            raise CaptureError(
                f"the forward of {type(self.model).__name__} looks at values at {model_line()}: {name_of(func)} needs "
                f"{error}. Masks, lengths and embeddings can be looked at when they are given with values; latents and "
                "timesteps cannot, since they change at every step."
            ) from cause


def trace(
    model: nn.Module,
    forward: Callable[..., Any],
    blocks: Iterable[str],
    inputs: CallInputs,
    main_input: str,
    count_work: bool = False,
) -> Record:
    """Record one call of `forward`, a bound method of `model`, with `blocks` as opaque calls.

    With `count_work` every node carries what it would cost to run in `meta["work"]`, and of that the floating-point
    operations in `meta["flops"]`.

    Raises:
        CaptureError: the glue does something that cannot be recorded; names the model's line.
    """
    blocks = list(blocks)
    copied: frozenset[str] = frozenset()
    with CAPTURE_LOCK:
        while True:
            record = Record(model, inputs, main_input, count_work)
            try:
                Tracer(record, blocks).run(forward, copied)
                return record
            except WritesIntoInputError as error:
                copied |= {error.path}
                refuse_aliases(model, inputs, error.path)
            finally:
                record.originals.clear()  # who keeps the record, as the frames of an error do, does not keep the weights
