"""Names of torch that are not public API, in one place: when a release moves one, this is the file to mend.

Supported: torch 2.11 to 2.13. Not here are the dictionaries in which an `nn.Module` holds what is registered on it
(`_parameters`, `_buffers`, `_modules`, `_non_persistent_buffers_set`): the code that takes modules apart names them itself.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.distributed import distributed_c10d as c10d
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as modules
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

NEEDS_VALUES: tuple[type[BaseException], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""What a fake tensor raises when an operation would have to look at its values."""

FSDP_ATTRIBUTES = (STATE_KEY, REGISTRY_KEY)
"""Attributes that FSDP2 leaves on a module whose weights it shards."""

GLOBAL_FORWARD_HOOKS = (modules._global_forward_pre_hooks, modules._global_forward_hooks)
"""The hooks of `register_module_forward_pre_hook` and `register_module_forward_hook`, which act on every module there is."""

DispatchMode = TorchDispatchMode
"""A mode that sees every operation that reaches torch's dispatcher."""


def is_higher_order(func: Any) -> bool:
    """Whether the operation is one that calls functions (`cond`, `flex_attention`)."""
    return isinstance(func, HigherOrderOperator)


CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The kernel of the CPU behind `scaled_dot_product_attention`."""


def new_fake_mode() -> FakeTensorMode:
    """A mode whose tensors have shapes but no data, and that mixes with real tensors (buffers, constants)."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def real_tensors() -> AbstractContextManager[Any]:
    """Inside this context tensors are real and operations run, although fake and counting modes are active."""
    return _disable_current_modes()


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for two tensors exactly when they share memory (a view and its base, a tensor and its `.data`)."""
    return tensor.untyped_storage()._cdata


def version(tensor: torch.Tensor) -> int:
    """How often the tensor, or what it is a view of, was written in place. -1 where torch does not count it."""
    return -1 if tensor.is_inference() else tensor._version


def without_base(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or of a view one that shares its memory but does not keep the tensor alive that it views."""
    return tensor.detach() if tensor._is_view() else tensor


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    return pytree.tree_unflatten(leaves, spec)


def tree_flatten_with_path(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    return pytree.tree_flatten_with_path(tree)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    return pytree.tree_map(function, tree)


def autocast_state(device_type: str) -> tuple[str, bool, torch.dtype]:
    return device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Device and dtype among the arguments of `Module.to`."""
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


def wrapper_tensor(
    cls: type[torch.Tensor],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """A tensor of class `cls` that has a shape and a device but no data; extensions that ask for it get an error."""
    wrapper = torch.Tensor._make_wrapper_subclass(
        cls, shape, strides=strides, storage_offset=offset, dtype=dtype, device=device
    )
    torch._C._set_throw_on_mutable_data_ptr(wrapper)
    return wrapper


def no_torch_function() -> AbstractContextManager[Any]:
    """Inside this context operations on subclasses go straight to their `__torch_dispatch__`."""
    return torch._C.DisableTorchFunctionSubclass()


def no_autocast() -> AbstractContextManager[Any]:
    """Inside this context operations run in the dtypes they are given, on every device."""
    return torch._C._DisableAutocast()


def tracked_writes() -> AbstractContextManager[Any]:
    """Inside this context, in a `__torch_dispatch__`, writes are counted and views known as such, as outside of it."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def is_tracked_view(tensor: torch.Tensor) -> bool:
    """Whether torch knows the tensor as a view of another; views of inference tensors are not tracked."""
    return tensor._is_view()


@functools.cache
def composite_kernel(func: OpOverload) -> Callable[..., Any] | None:
    """The kernel that makes `func` of other operations, if it is made so on every device (`chunk`, `reshape`, `to`)."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
        return None
    return lambda *args, **kwargs: func._op_dk(key, *args, **kwargs)


def is_elementwise(func: OpOverload) -> bool:
    """Whether torch says that the operation computes each element from elements, and nothing but that."""
    tags = func.tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags and not func._schema.is_mutable


PRIVATE_TENSOR_METHODS = frozenset(
    {torch.Tensor._typed_storage, torch.Tensor._version.__get__}  # type: ignore[attr-defined]
)
"""As `__torch_function__` gets them: what pickling and sharing of memory look at, and `tensor._version`."""


def chunked(batched: bool) -> Any:
    """What tells torch's schedules to cut a value along its first dimension, or to give it to every microbatch whole."""
    from torch.distributed.pipelining import microbatch

    return microbatch.TensorChunkSpec(0) if batched else microbatch._Replicate()


def symmetric_memory(size: int, group: dist.ProcessGroup, device: torch.device) -> tuple[torch.Tensor, Any]:
    """Bytes on this rank's GPU that the other ranks of the group, on the same host, can reach; all call it together.

    Returns:
        this rank's bytes, and a handle with `buffer_ptrs` (addresses of all ranks' bytes, for this GPU) and `get_buffer`.
    """
    from torch.distributed import _symmetric_memory

    memory = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    return memory, _symmetric_memory.rendezvous(memory, group)


def default_store() -> dist.Store:
    """The store through which the default process group was made."""
    return c10d._get_default_store()


def own_client(store: dist.Store) -> dist.Store:
    """A second connection to a store: requests of one connection wait for each other."""
    client: dist.Store = store.clone()  # type: ignore[attr-defined]
    return client


def every_group() -> list[tuple[dist.ProcessGroup, str]]:
    """All process groups that this rank is in, each with the names of its backends; none that is being destroyed."""
    backends = dict(c10d._world.pg_backend_config)
    return [(group, str(backends[group])) for group in list(c10d._world.pg_map) if group in backends]


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensors of all ranks of a group one after the other along the first dimension; has a shape on fake tensors too."""
    functional = torch.ops._c10d_functional
    gathered: torch.Tensor = functional.wait_tensor(
        functional.all_gather_into_tensor(tensor, group.size(), group.group_name)
    )
    return gathered


def all_to_all(tensor: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Parts of the first dimension, `sent[i]` long, to each rank i of a group, and `received[i]` long ones of each."""
    functional = torch.ops._c10d_functional
    exchanged: torch.Tensor = functional.wait_tensor(
        functional.all_to_all_single(tensor, received, sent, group.group_name)
    )
    return exchanged


def sum_over_ranks(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of a tensor over the ranks of a group, on each of them. Works on fake tensors and under torch.compile too."""
    from torch.distributed import _functional_collectives as collectives

    summed: torch.Tensor = collectives.wait_tensor(collectives.all_reduce(tensor, "sum", group))
    return summed


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that is spread over ranks; of any other, the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether ranks hold a part of the tensor each."""
    return isinstance(tensor, DTensor)


@contextmanager
def without_gathering(model: torch.nn.Module) -> Iterator[None]:
    """Inside this context modules of the model that FSDP2 has sharded run without gathering their weights."""
    removed = []
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp."):
                    removed.append((hooks, dict(hooks)))
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, before in reversed(removed):
            hooks.clear()
            hooks.update(before)
