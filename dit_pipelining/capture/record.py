"""What has been recorded of a forward: the graph so far, and which of its nodes each value in the model's code is."""

import enum
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from dit_pipelining.capture import replay
from dit_pipelining.capture.counting import WorkCounter
from dit_pipelining.capture.model_line import model_line
from dit_pipelining.capture.signature import CONSTANTS, MADE, CallInputs, ObjectTensor, object_parts
from dit_pipelining.capture.structure import is_namedtuple, tensors_in
from dit_pipelining.errors import CaptureError
from dit_pipelining.torch_internals import autocast_state, is_fake, new_fake_mode, storage_key


class WritesIntoInputError(Exception):
    """The forward writes into the input at this path; the trace must start again on a copy of it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Record:
    """One call of a forward, as far as it has been recorded. See [Note: how a forward is recorded] in trace.py.

    Args:
        model: that is captured.
        inputs: of the call.
        main_input: name of the input that has the latents.
        count_work: note what every node would cost to run.

    Attributes:
        graph: the FX graph recorded so far.
        constants: tensors and objects that are neither inputs nor the model's own, by their target in the graph.
        originals: the model's own tensors by name; those that stand in for them have their name in `names`, by id.
        nodes: the node of each value, by the value's id; the value is kept alive, so that its id stays its own.
        asked: the questions whose answers depend on inputs: a node that asks, and the answer.
        output: the forward's return value, with nodes in the place of tensors.
        object_tensors: what tensors its objects hold afterwards, see `object_layouts`.
        lora_scale: the scale the forward applied to LoRA layers around itself.
        hooked: the modules outside of blocks that are one call because of a hook, and the names of what they compute with.
        handing: the blocks that give some of their arguments back as they are.
        draws: what draws random numbers in a block, if something does.
    """

    def __init__(self, model: nn.Module, inputs: CallInputs, main_input: str, count_work: bool) -> None:
        self.model = model
        self.inputs = inputs
        self.main_input = main_input
        self.device = _device_of(inputs, model)
        self.fake_mode = new_fake_mode()
        self.counter = WorkCounter() if count_work else None
        self.graph = fx.Graph()
        self.made = self.graph.placeholder("made")
        self.made.meta["input"] = MADE
        self.constants: dict[str, Any] = {}
        attributes = _tensor_attributes(model)
        self.originals: dict[str, torch.Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
            **attributes,
        }
        self.names: dict[int, str] = {}
        self.nodes: dict[int, tuple[Any, fx.Node]] = {}
        self.asked: list[tuple[fx.Node, Any]] = []
        self.output: Any = None
        self.object_tensors: dict[str, tuple[ObjectTensor, ...]] = {}
        self.lora_scale = 1.0
        self.hooked: dict[str, frozenset[str]] = {}
        self.handing: set[str] = set()
        self.draws = ""
        self._attributes = {id(tensor): name for name, tensor in attributes.items()}
        self._ambient = _ambient()

    def fake(self, tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """A stand-in of a tensor, without data."""
        with self.fake_mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device
            )

    def fake_weight(self, tensor: torch.Tensor) -> torch.Tensor:
        """A stand-in of one of the model's tensors: a rank moves those of its stage to the device of the capture."""
        return self.fake(tensor, self.device)

    # ---- nodes ---------------------------------------------------------------------------------------------------------

    def create(self, operation: replay.Operation, args: Any, kwargs: Any) -> fx.Node:
        """Record an operation on values of the model's code."""
        node_args, node_kwargs = self.to_nodes(tuple(args)), self.to_nodes(dict(kwargs))
        kind, target = operation
        ambient = _ambient()
        if ambient != self._ambient:
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

    def skip_work(self) -> None:
        """What has been counted so far belongs to no later node."""
        if self.counter is not None:
            self.counter.start()

    def know_result(self, result: Any, node: fx.Node, written: list[torch.Tensor]) -> None:
        """Name every tensor whose memory the node wrote into, and the tensors in its result."""
        if written:
            self._know_written(node, written)
        if not isinstance(result, torch.Tensor):
            self._know_parts(result, node)
        elif id(result) not in self.nodes or any(result is tensor for tensor in written):
            self.know(result, node)

    def _know_written(self, node: fx.Node, written: list[torch.Tensor]) -> None:
        earlier_readers: set[fx.Node] = set()
        storages = {storage_key(tensor) for tensor in written}
        for value, known in list(self.nodes.values()):
            if _is_dense_tensor(value) and storage_key(value) in storages:
                self._refuse_foreign(known)
                known.meta["overwritten"] = True
                earlier_readers |= known.users.keys() - {node}
                self.know(value, self.graph.call_function(replay.written, (known, node)))
        node.meta["writes"] = earlier_readers

    def mark_returned(self, result: Any) -> None:
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
                self.know(part, part_node)
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

    def know(self, value: Any, node: fx.Node) -> None:
        """Say which node a value is from now on."""
        if isinstance(value, torch.Tensor):
            node.meta["shape"], node.meta["dtype"] = tuple(value.shape), value.dtype
            node.meta["stride"], node.meta["device"] = value.stride(), value.device
            node.meta["memory"] = storage_key(value) if _is_dense_tensor(value) else None
        self.nodes[id(value)] = (value, node)

    @contextmanager
    def known_as(self, nodes: dict[int, tuple[Any, fx.Node]]) -> Iterator[None]:
        """Inside this context these values (by id) have other nodes than they were recorded with."""
        saved, self.nodes = self.nodes, {**self.nodes, **nodes}
        try:
            yield
        finally:
            self.nodes = saved

    # ---- values as nodes -----------------------------------------------------------------------------------------------

    def to_nodes(self, value: Any, output: bool = False) -> Any:
        """A nested value with nodes in the place of tensors and objects; of a forward's output, its own classes stay."""
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
            return slice(*(self.to_nodes(part) for part in (value.start, value.stop, value.step)))
        if output and hasattr(value, "to_tuple"):  # diffusers' output classes: a dict with a type
            return replay.Rebuilt(type(value), {name: self.to_nodes(item, output) for name, item in value.items()})
        if is_namedtuple(value):
            items = [self.to_nodes(item, output) for item in value]
            return replay.Rebuilt(type(value), dict(zip(value._fields, items, strict=True)))
        if isinstance(value, list | tuple):
            return type(value)(self.to_nodes(item, output) for item in value)
        if isinstance(value, dict):
            entries = {name: self.to_nodes(item, output) for name, item in value.items()}
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
        node_parts = [self.to_nodes(part) for part in parts]
        node = self.graph.call_function(replay.instantiate, (template, node_parts, self.made))
        node.meta["template"] = template.target
        self.know(value, node)
        return node

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node of a tensor in the model's code: one that was recorded, or the model's own."""
        if id(tensor) in self.nodes:
            return self.nodes[id(tensor)][1]
        name = self.names.get(id(tensor)) or self._attributes.get(id(tensor))
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
        self.know(tensor, node)
        return node

    def _constant(self, value: Any) -> fx.Node:
        target = f"_constants.{len(self.constants)}"
        self.constants[target] = value
        return self.graph.get_attr(target)


def _device_of(inputs: CallInputs, model: nn.Module) -> torch.device:
    """The device of the capture: the accelerator of the inputs or weights, else that of the weights that are there.

    Weights may not be there yet, or may still be on the CPU: a rank moves those of its stage once it knows which they are.
    """
    given = [tensor.device for tensor in inputs.tensors.values()]
    there = [p.device for p in model.parameters() if p.device.type != "meta"]
    accelerators = (device for device in (*given, *there) if device.type not in ("cpu", "meta"))
    return next(accelerators, next(iter((*there, *given)), torch.device("cpu")))


def _tensor_attributes(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that are plain attributes of modules, such as rotary tables, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


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
