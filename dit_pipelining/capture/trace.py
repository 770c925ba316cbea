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

import enum
import os
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy
import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from dit_pipelining.capture import replay
from dit_pipelining.capture.counting import WorkCounter
from dit_pipelining.capture.quantised import is_quantised_linear, like_quantised_linear
from dit_pipelining.capture.sandbox import (
    CAPTURE_LOCK,
    collected_lora_scales,
    exchanged_tensors,
    intercepted_calls,
    intercepted_function,
)
from dit_pipelining.capture.signature import (
    CONSTANTS,
    MADE,
    CallInputs,
    ObjectTensor,
    object_parts,
    object_state,
    objects_in,
    rebuild_inputs,
)
from dit_pipelining.capture.structure import is_namedtuple, tensors_in
from dit_pipelining.capture.values import ValueNeededError, Values
from dit_pipelining.errors import CaptureError
from dit_pipelining.torch_internals import (
    NEEDS_VALUES,
    autocast_state,
    is_fake,
    new_fake_mode,
    real_tensors,
    storage_key,
    version,
    without_gathering,
)

OPAQUE_PACKAGES = ("torch.nn.", "torch.ao.", "torchao.", "peft.", "bitsandbytes.", "diffusers.quantizers.")
"""Modules with parameters from these packages are recorded as one call, since their inner state is their own affair."""

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

NOT_THE_MODEL = ("<", *(str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])))
"""How the file names of code begin that is not the model's: generated code, torch, this package."""

NOT_RECORDED = frozenset(
    {
        "shape",
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "is_cuda",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "grad_fn",
    }
    | {"ndim", "is_leaf", "names", "itemsize", "nbytes", "is_cpu", "is_xpu", "is_mps", "is_nested", "_version"}
)
"""Properties whose answers do not depend on values."""


RANDOM = frozenset(
    {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "random", "normal", "uniform"}
    | {"bernoulli", "multinomial", "poisson", "exponential", "cauchy", "geometric", "log_normal"}
)
"""Names of torch's functions that draw random numbers, and, with an underscore, of methods that fill a tensor."""


class Tracer(TorchFunctionMode):
    """Records one call of `model.forward`. Use `trace`.

    Attributes:
        graph: the FX graph recorded so far.
        constants: tensors and objects that are neither inputs nor the model's own, by their target in the graph.
        output: the forward's return value, with nodes in the place of tensors.
        lora_scale: the scale the forward applied to LoRA layers around itself.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[str],
        inputs: CallInputs,
        main_input: str,
        copied: frozenset[str],
        count_work: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.main_input = main_input
        self.inputs = inputs
        self.graph = fx.Graph()
        self.constants: dict[str, Any] = {}
        self.output: Any = None
        self.lora_scale = 1.0
        self.blocks = {id(model.get_submodule(name)): name for name in blocks}
        self.modules = {id(module): name for name, module in reversed(list(model.named_modules()))}
        self.attributes = {id(tensor): name for name, tensor in _tensor_attributes(model).items()}
        self.opaque = {id(m) for m in model.modules() if id(m) in self.blocks or _is_opaque(m)}
        self.quantised = {id(m) for m in model.modules() if is_quantised_linear(m)}
        self.fake_mode = new_fake_mode()
        self.names: dict[int, str] = {}
        self.originals: dict[str, torch.Tensor] = {}
        self.copied = copied
        # By id; the value is kept alive, so that its id stays its own.
        self.nodes: dict[int, tuple[Any, fx.Node]] = {}
        self.object_states: dict[int, Any] = {}
        self.object_tensors: dict[str, tuple[ObjectTensor, ...]] = {}
        self.values = Values(self)
        self.inside_opaque = False
        self.ambient = _ambient()
        self.counter = WorkCounter() if count_work else None

    # ---- the run ------------------------------------------------------------------------------------------------------

    def run(self, forward: Callable[..., Any]) -> None:
        self.originals = {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
            **_tensor_attributes(self.model),
        }
        self.device = _device_of(self.inputs, self.model)
        with (
            exchanged_tensors(self.model, self._fake_like) as self.names,
            without_gathering(self.model),
            intercepted_calls(self._call) as self.plain_call,
            collected_lora_scales(self.model) as scales,
            intercepted_function(self.model, "create_block_mask", self._create_block_mask),
            intercepted_function(self.model, "flex_attention", self._flex_attention),
            torch.inference_mode(False),
            torch.no_grad(),
            self.fake_mode,
            self.counter or nullcontext(),
        ):
            leaves = self._place_inputs()
            kwargs = rebuild_inputs(self.inputs.kwargs, leaves)
            with self, _no_other_randomness(self.model):
                result = forward(**kwargs)
            self._refuse_filled_containers(self.inputs.kwargs, kwargs)
            self.output = self._to_nodes(result, output=True)
            self.object_tensors = self._layouts({path: leaves[path] for path in self.inputs.objects})
            self._mark_returned(result)
        self.lora_scale = scales[-1] if scales else 1.0

    def _refuse_filled_containers(self, given: Any, used: Any) -> None:
        """Stages get containers of their own: what the forward puts into the caller's would be lost."""
        added = used[len(given) :] if isinstance(given, list) else [v for k, v in used.items() if k not in given]
        if any(True for _ in tensors_in(added)):
            raise CaptureError(
                f"the forward of {type(self.model).__name__} puts tensors into a {type(given).__name__} that the caller gave. "
                "Stages cannot give them back; let the forward return them."
            )
        pairs = zip(given.values(), used.values(), strict=False) if isinstance(given, dict) else ()
        for one, other in pairs if isinstance(given, dict) else zip(given, used, strict=False):
            if isinstance(one, list | dict) and isinstance(other, list | dict):
                self._refuse_filled_containers(one, other)

    def _fake_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.fake(tensor, self.device)

    def fake(self, tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        with self.fake_mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device
            )

    def _place_inputs(self) -> dict[str, Any]:
        """Fake stand-ins of the call's tensors and objects, each with its placeholder."""
        leaves: dict[str, Any] = {}
        self.made = self.graph.placeholder("made")
        self.made.meta["input"] = MADE
        for path, tensor in self.inputs.tensors.items():
            leaves[path] = self.fake(tensor)
            node = self.graph.placeholder(path.replace(".", "_"))
            node.meta["input"] = path
            self._know(leaves[path], node)
            if path in self.copied:
                self._know(leaves[path], self.graph.call_method("clone", (node,)))
        for path, value in self.inputs.objects.items():
            leaves[path] = self._place_object(path, value)
        return leaves

    def _place_object(self, path: str, value: Any) -> Any:
        node = self.graph.placeholder(path.replace(".", "_"))
        node.meta["input"] = path
        tensors = [part for _, part in object_parts(value) if isinstance(part, torch.Tensor)]
        with real_tensors():
            copy = deepcopy(value, {id(tensor): self._fake_part(tensor) for tensor in tensors})
        for steps, part in object_parts(copy):
            part_node = node
            for kind, key in steps:
                step = getattr if kind == "attribute" else replay.getitem
                part_node = self.graph.call_function(step, (part_node, key))
            part_node.meta["object"] = True
            self._know(part, part_node)
        return copy

    def _fake_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """A stand-in of a tensor in an object; on the meta device is what another rank holds (`complete_object`)."""
        return self.fake(tensor, self.device if tensor.device.type == "meta" else None)

    def _layouts(self, placed: Mapping[str, Any]) -> dict[str, tuple[ObjectTensor, ...]]:
        """What tensors the objects hold when the forward has run: the caller's by path, the others by their template."""
        made = {node.meta["template"]: value for value, node in self.nodes.values() if "template" in node.meta}
        return {
            key: tuple(
                ObjectTensor(steps, tuple(part.shape), part.dtype)
                for steps, part in object_parts(value)
                if isinstance(part, torch.Tensor) and steps
            )
            for key, value in (*placed.items(), *made.items())
        }

    # ---- one call of torch's API --------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside_opaque or torch.compiler.is_compiling() or _is_plain_property(func):
            return self._run(func, args, kwargs)
        if _is_random(func, kwargs):
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
            if _name(func) not in ("numpy", "__array__"):
                raise
            result = self._answer(func, args, kwargs, cause=error)
        written = [tensor for tensor, before in versions if version(tensor) != before]
        if _sets_data(func):  # x.data = y, which torch does not count as a write
            written.append(args[0])
        fresh = any(id(t) not in self.nodes for t in tensors_in(result))
        if fresh or written:
            operation, call_args = replay.as_node_call(func, args)
            node = self.create(operation, call_args, kwargs)
            self._know_result(result, node, written)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.counter is not None and func is torch.nn.functional.scaled_dot_product_attention:
            return self.counter.run_attention(func, args, kwargs)
        return func(*args, **kwargs)

    def create(self, operation: replay.Operation, args: Any, kwargs: Any) -> fx.Node:
        node_args, node_kwargs = self._to_nodes(tuple(args)), self._to_nodes(dict(kwargs))
        kind, target = operation
        ambient = _ambient()
        if ambient != self.ambient:
            if kind == "call_module":
                module = self.graph.get_attr(target)
                kind, target, node_args = "call_function", replay.call, (module, *node_args)
            elif kind == "call_method":
                kind, target = "call_function", replay.method(target)
            target = replay.under_autocast(target, ambient)
        node = self.graph.create_node(kind, target, node_args, node_kwargs)
        if self.counter is not None:
            node.meta["work"] = self.counter.taken()
            node.meta["flops"] = node.meta["work"].flops
        return node

    def _skip_work(self) -> None:
        """What has been counted so far belongs to no later node."""
        if self.counter is not None:
            self.counter.start()

    def _know_result(self, result: Any, node: fx.Node, written: list[torch.Tensor]) -> None:
        """Name every tensor whose memory the node wrote into, and the tensors in its result."""
        if written:
            self._know_written(node, written)
        if not isinstance(result, torch.Tensor):
            self._know_parts(result, node)
        elif id(result) not in self.nodes or any(result is tensor for tensor in written):
            self._know(result, node)

    def _know_written(self, node: fx.Node, written: list[torch.Tensor]) -> None:
        earlier_readers: set[fx.Node] = set()
        storages = {storage_key(tensor) for tensor in written}
        for value, known in list(self.nodes.values()):
            if _is_dense_tensor(value) and storage_key(value) in storages:
                self._refuse_foreign(known)
                known.meta["overwritten"] = True
                earlier_readers |= known.users.keys() - {node}
                self._know(value, self.graph.call_function(replay.written, (known, node)))
        node.meta["writes"] = earlier_readers

    def _mark_returned(self, result: Any) -> None:
        """What shares memory with the forward's result belongs to the caller, who may write into it."""
        storages = {storage_key(tensor) for tensor in tensors_in(result) if _is_dense_tensor(tensor)}
        for value, node in self.nodes.values():
            if _is_dense_tensor(value) and storage_key(value) in storages:
                node.meta["returned"] = True

    def _know_parts(self, result: Any, node: fx.Node) -> None:
        for access, part in _parts(result):
            if isinstance(part, torch.Tensor) and id(part) in self.nodes:
                continue
            has_tensors = isinstance(part, torch.Tensor) or any(True for _ in tensors_in(part))
            if not has_tensors:
                continue
            part_node = self.graph.call_function(replay.getitem, (node, access))
            if isinstance(part, torch.Tensor):
                self._know(part, part_node)
            else:
                self._know_parts(part, part_node)

    def _refuse_foreign(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            raise WritesIntoInputError(node.meta["input"])
        if node.op == "get_attr":
            raise CaptureError(
                f"the forward of {type(self.model).__name__} writes in place into {node.target!r} ({model_line()}). "
                "Every stage would do that to its own copy, so it cannot be split as it is."
            )

    def _know(self, value: Any, node: fx.Node) -> None:
        if isinstance(value, torch.Tensor):
            node.meta["shape"], node.meta["dtype"] = tuple(value.shape), value.dtype
            node.meta["stride"], node.meta["device"] = value.stride(), value.device
            node.meta["memory"] = storage_key(value) if _is_dense_tensor(value) else None
        self.nodes[id(value)] = (value, node)

    # ---- one call of a module -----------------------------------------------------------------------------------------

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.inside_opaque or id(module) not in self.opaque:
            return self._run_module(module, args, kwargs)
        versions = [(t, version(t)) for t in tensors_in((args, kwargs))]
        name = self.modules[id(module)]
        self._skip_work()
        node_arguments = self._to_nodes(args), self._to_nodes(kwargs)  # as they are before the call changes them
        self._refuse_changed_objects((args, kwargs))
        self.inside_opaque = True
        try:
            result = self._run_module(module, args, kwargs)
        except NEEDS_VALUES:
            result = self._run_looking_at_values(module, args, kwargs)
        finally:
            self.inside_opaque = False
        self._remember_objects((args, kwargs))
        node = self.create(("call_module", name), *node_arguments)
        if id(module) in self.blocks:
            node.meta["block"] = name
        written = [tensor for tensor, before in versions if version(tensor) != before]
        self._know_result(result, node, written)
        return result

    def _run_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if id(module) in self.quantised:
            return like_quantised_linear(module, *args, **kwargs)
        return self.plain_call(module, *args, **kwargs)

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
        self._skip_work()
        counter, self.counter = self.counter, None  # what is recorded of the inside takes no part of the block's work
        try:
            with self.values.stand_ins():
                result = self.plain_call(module, *args, **kwargs)
        finally:
            self.opaque.add(id(module))
            self.counter = counter
        given = {id(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if id(tensor) not in given:
                self.nodes.pop(id(tensor), None)
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

    # ---- values as nodes ----------------------------------------------------------------------------------------------

    def _to_nodes(self, value: Any, output: bool = False) -> Any:
        if isinstance(value, fx.Node) or value is Ellipsis or isinstance(value, torch.memory_format | torch.layout):
            return value
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if output and isinstance(value, CONSTANTS):
            return value
        if isinstance(value, torch.Size):
            return tuple(value)
        if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
            return value.item()  # its own repr is no code
        if isinstance(value, enum.Enum):
            return self._constant(value)
        if isinstance(value, CONSTANTS):
            return value
        if id(value) in self.nodes:
            return self.nodes[id(value)][1]
        if isinstance(value, slice):
            return slice(*(self._to_nodes(part) for part in (value.start, value.stop, value.step)))
        if output and hasattr(value, "to_tuple"):  # diffusers' output classes: a dict with a type
            return replay.Rebuilt(type(value), {name: self._to_nodes(item, output) for name, item in value.items()})
        if is_namedtuple(value):
            items = [self._to_nodes(item, output) for item in value]
            return replay.Rebuilt(type(value), dict(zip(value._fields, items, strict=True)))
        if isinstance(value, list | tuple):
            return type(value)(self._to_nodes(item, output) for item in value)
        if isinstance(value, dict):
            entries = {name: self._to_nodes(item, output) for name, item in value.items()}
            return entries if type(value) is dict or not output else replay.Typed(type(value), entries)
        return self._object(value)

    def _object(self, value: Any) -> fx.Node:
        """An object that glue made and hands to a block or returns: made again at each call from what is in it."""
        if isinstance(value, FunctionType) and value.__closure__:
            raise CaptureError(
                f"the forward of {type(self.model).__name__} hands the function {value.__qualname__!r} to a block, at "
                f"{model_line()}. What it refers to would stay as it is now; pass values instead."
            )
        parts = [
            p for _, p in object_parts(value, known=self.nodes) if isinstance(p, torch.Tensor) or id(p) in self.nodes
        ]
        template = self._constant(replay.Template.of(value, parts))
        node_parts = [self._to_nodes(part) for part in parts]
        node = self.graph.call_function(replay.instantiate, (template, node_parts, self.made))
        node.meta["template"] = template.target
        self._know(value, node)
        return node

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        if id(tensor) in self.nodes:
            return self.nodes[id(tensor)][1]
        name = self.names.get(id(tensor)) or self.attributes.get(id(tensor))
        if name is not None:
            node = self.graph.get_attr(name)
        elif not is_fake(tensor):
            node = self._constant(tensor)
        else:
            raise CaptureError(
                f"the forward of {type(self.model).__name__} uses a tensor {tuple(tensor.shape)} that was made where it "
                f"cannot be recorded, at {model_line()}. If a helper thread or a compiled function made it, name the "
                "blocks with blocks=[...] so that this code lies inside a block."
            )
        self._know(tensor, node)
        return node

    def _constant(self, value: Any) -> fx.Node:
        target = f"_constants.{len(self.constants)}"
        self.constants[target] = value
        return self.graph.get_attr(target)

    # ---- questions about values ---------------------------------------------------------------------------------------

    @contextmanager
    def known_as(self, nodes: dict[int, tuple[Any, fx.Node]]) -> Iterator[None]:
        """Inside this context these values (by id) have other nodes than they were recorded with."""
        saved, self.nodes = self.nodes, {**self.nodes, **nodes}
        try:
            yield
        finally:
            self.nodes = saved

    def _answer(self, func: Any, args: Any, kwargs: Any, cause: BaseException | None = None) -> Any:
        try:
            return self.values.answer(func, args, kwargs)
        except ValueNeededError as error:
            raise CaptureError(
                f"the forward of {type(self.model).__name__} looks at values at {model_line()}: {_name(func)} needs "
                f"{error}. Masks, lengths and embeddings can be looked at when they are given with values; latents and "
                "timesteps cannot, since they change at every step."
            ) from cause


class WritesIntoInputError(Exception):
    """The forward writes into the input at this path; the trace must start again on a copy of it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


def trace(
    model: nn.Module,
    forward: Callable[..., Any],
    blocks: Iterable[str],
    inputs: CallInputs,
    main_input: str,
    count_work: bool = False,
) -> Tracer:
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
            tracer = Tracer(model, blocks, inputs, main_input, copied, count_work)
            try:
                tracer.run(forward)
                return tracer
            except WritesIntoInputError as error:
                copied |= {error.path}
                _refuse_aliases(model, inputs, error.path)
            finally:
                tracer.originals.clear()  # it and its values know each other: the weights would live until a collection


def _refuse_aliases(model: nn.Module, inputs: CallInputs, path: str) -> None:
    """The write goes to a copy, which other inputs in the same memory would not see."""
    written = inputs.tensors[path]
    if written.device.type == "meta":
        return
    for other, tensor in inputs.tensors.items():
        if other != path and tensor.device.type != "meta" and storage_key(tensor) == storage_key(written):
            raise CaptureError(
                f"the forward of {type(model).__name__} writes in place into the input {path!r}, which shares its memory with "
                f"{other!r}. Pass a copy of one of them."
            )


def model_line() -> str:
    """Where in the model's code we are: the innermost frame outside torch and this package."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(NOT_THE_MODEL):
            return f"{frame.filename}:{frame.lineno} ({(frame.line or '').strip()})"
    return "an unknown line"


def _device_of(inputs: CallInputs, model: nn.Module) -> torch.device:
    """The device of the capture: the accelerator of the inputs or weights, else that of the weights that are there.

    Weights may not be there yet, or may still be on the CPU: a rank moves those of its stage once it knows which they are.
    """
    given = [tensor.device for tensor in inputs.tensors.values()]
    there = [p.device for p in model.parameters() if p.device.type != "meta"]
    accelerators = (device for device in (*given, *there) if device.type not in ("cpu", "meta"))
    return next(accelerators, next(iter((*there, *given)), torch.device("cpu")))


@contextmanager
def _no_other_randomness(model: nn.Module) -> Iterator[None]:
    """Refuse glue that draws from Python's or NumPy's generators, whose draws would be frozen into the graph."""
    before = random.getstate(), repr(numpy.random.get_state(legacy=False))
    yield
    if (random.getstate(), repr(numpy.random.get_state(legacy=False))) != before:
        raise CaptureError(
            f"the forward of {type(model).__name__} draws random numbers from Python's or NumPy's generator. Ranks would "
            "draw different ones; pass the numbers in as an input."
        )


def _tensor_attributes(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that are plain attributes of modules, such as rotary tables, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def _is_opaque(module: nn.Module) -> bool:
    path = type(module).__module__ + "."
    if isinstance(module, CONTAINERS) or not path.startswith(OPAQUE_PACKAGES):
        return False
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _is_plain_property(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__get__" and getattr(func.__self__, "__name__", "") in NOT_RECORDED


def _is_random(func: Any, kwargs: Any) -> bool:
    if _name(func) in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        return bool(kwargs.get("training")) and kwargs.get("p", 0.5) > 0
    return _name(func).removesuffix("_") in RANDOM and kwargs.get("generator") is None


def _sets_data(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__set__" and getattr(func.__self__, "__name__", "") == "data"


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


def _ambient() -> tuple[Any, ...]:
    return autocast_state("cpu"), autocast_state("cuda")


def _is_dense_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, list | tuple):
        return enumerate(value)
    if isinstance(value, dict):
        return value.items()
    return ()
