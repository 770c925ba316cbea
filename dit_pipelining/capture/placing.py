"""The inputs of a call in a record: stand-ins of tensors and objects, and what objects hold when the forward has run."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from dit_pipelining.capture import replay
from dit_pipelining.capture.record import Record
from dit_pipelining.capture.signature import CallInputs, ObjectTensor, object_parts
from dit_pipelining.capture.structure import tensors_in
from dit_pipelining.errors import CaptureError
from dit_pipelining.torch_internals import real_tensors, storage_key


def place_inputs(record: Record, copied: frozenset[str]) -> dict[str, Any]:
    """Stand-ins of the call's tensors and objects by path, each with its placeholder; those at `copied` are copied first."""
    leaves: dict[str, Any] = {}
    for path, tensor in record.inputs.tensors.items():
        leaves[path] = record.fake(tensor)
        node = record.graph.placeholder(path.replace(".", "_"))
        node.meta["input"] = path
        record.know(leaves[path], node)
        if path in copied:
            record.know(leaves[path], record.graph.call_method("clone", (node,)))
    for path, value in record.inputs.objects.items():
        leaves[path] = _place_object(record, path, value)
    return leaves


def refuse_aliases(model: nn.Module, inputs: CallInputs, path: str) -> None:
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


def object_layouts(record: Record, placed: Mapping[str, Any]) -> dict[str, tuple[ObjectTensor, ...]]:
    """What tensors the objects hold when the forward has run: the caller's by path, the others by their template."""
    made = {node.meta["template"]: value for value, node in record.nodes.values() if "template" in node.meta}
    return {
        key: tuple(
            ObjectTensor(steps, tuple(part.shape), part.dtype)
            for steps, part in object_parts(value)
            if isinstance(part, torch.Tensor) and steps
        )
        for key, value in (*placed.items(), *made.items())
    }


def refuse_filled_containers(record: Record, given: Any, used: Any) -> None:
    """Stages get containers of their own: what the forward puts into the caller's would be lost."""
    added = used[len(given) :] if isinstance(given, list) else [v for k, v in used.items() if k not in given]
    if any(True for _ in tensors_in(added)):
        raise CaptureError(
            f"the forward of {type(record.model).__name__} puts tensors into a {type(given).__name__} that the caller gave. "
            "Stages cannot give them back; let the forward return them."
        )
    pairs = zip(given.values(), used.values(), strict=False) if isinstance(given, dict) else ()
    for one, other in pairs if isinstance(given, dict) else zip(given, used, strict=False):
        if isinstance(one, list | dict) and isinstance(other, list | dict):
            refuse_filled_containers(record, one, other)


def _place_object(record: Record, path: str, value: Any) -> Any:
    node = record.graph.placeholder(path.replace(".", "_"))
    node.meta["input"] = path
    tensors = [part for _, part in object_parts(value) if isinstance(part, torch.Tensor)]
    with real_tensors():
        copy = deepcopy(value, {id(tensor): _fake_part(record, tensor) for tensor in tensors})
    for steps, part in object_parts(copy):
        part_node = node
        for kind, key in steps:
            step = getattr if kind == "attribute" else replay.getitem
            part_node = record.graph.call_function(step, (part_node, key))
        part_node.meta["object"] = True
        record.know(part, part_node)
    return copy


def _fake_part(record: Record, tensor: torch.Tensor) -> torch.Tensor:
    """A stand-in of a tensor in an object; on the meta device is what another rank holds (`complete_object`)."""
    return record.fake(tensor, record.device if tensor.device.type == "meta" else None)
