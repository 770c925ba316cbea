"""Kinds of torch's operations: which of them a tensor whose data is still travelling can go along with."""

import functools

import torch

from dit_pipelining.torch_internals import PRIVATE_TENSOR_METHODS, OpOverload, is_elementwise

aten = torch.ops.aten

COPIES = {aten._to_copy.default, aten.clone.default, aten.cat.default, aten.stack.default}
"""Operations that move values and compute nothing, beside views."""

UNTAGGED_ELEMENTWISE = {aten.rsub.Tensor}
"""Elementwise operations that torch does not tag as such."""

FACTORIES = {
    aten.empty_like,
    aten.full_like,
    aten.ones_like,
    aten.rand_like,
    aten.randint_like,
    aten.randn_like,
    aten.zeros_like,
    aten.new_empty,
    aten.new_empty_strided,
    aten.new_full,
    aten.new_ones,
    aten.new_zeros,
}
"""Operations that look at the shape, dtype and device of a tensor and not at its data."""

FLAG_VIEWS = {aten._conj.default, aten._neg_view.default}
"""Views that set a flag of the tensor, which a wrapper cannot show."""

BESIDE_THE_DISPATCHER = {
    torch.Tensor.__array__,
    torch.Tensor.__bool__,
    torch.Tensor.__complex__,
    torch.Tensor.__cuda_array_interface__.__get__,
    torch.Tensor.__deepcopy__,
    torch.Tensor.__float__,
    torch.Tensor.__format__,
    torch.Tensor.__index__,
    torch.Tensor.__int__,
    torch.Tensor.__dlpack__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.__repr__,
    torch.Tensor.apply_,
    torch.Tensor.cpu,
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__,  # type: ignore[attr-defined]
    torch.Tensor.data_ptr,
    torch.Tensor.is_shared,
    torch.Tensor.item,
    torch.Tensor.map2_,
    torch.Tensor.map_,
    torch.Tensor.numpy,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad_,
    torch.Tensor.share_memory_,
    torch.Tensor.storage,
    torch.Tensor.storage_type,
    torch.Tensor.tolist,
    torch.Tensor.untyped_storage,
    *PRIVATE_TENSOR_METHODS,
}
"""Uses that do not come to `__torch_dispatch__`, or, like `float`, not where `torch.tensor([x, y])` calls them."""


@functools.cache
def is_view(func: OpOverload) -> bool:
    return (func.is_view or func is aten._unsafe_view.default) and func not in FLAG_VIEWS


@functools.cache
def computes_elementwise(func: OpOverload) -> bool:
    return is_elementwise(func) or func in UNTAGGED_ELEMENTWISE
