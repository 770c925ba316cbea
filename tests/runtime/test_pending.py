"""Tensors whose data is still travelling give what eager gives, and wait only where they must."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from hypothesis import given, settings
from hypothesis import strategies as st

from dit_pipelining.errors import SplitError
from dit_pipelining.runtime.pending import PendingTensor, is_pending, pending, resolved
from dit_pipelining.runtime.sources import Arrival
from dit_pipelining.torch_internals import tree_flatten

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.fixture(params=MODES, autouse=True)
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with MODES[request.param]():
        yield


class InFlight(NamedTuple):
    """A pending tensor, and how often its arrival has waited."""

    tensor: PendingTensor
    arrival: Arrival
    waits: list[None]


def in_flight(data: torch.Tensor) -> InFlight:
    """`data` as a pending tensor: its buffer holds NaN, or -1, until it is waited for."""
    buffer = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype)
    buffer.fill_(float("nan") if data.is_floating_point() else -1)
    data, waits = data.clone(), []

    def wait() -> None:
        buffer.copy_(data)
        waits.append(None)

    arrival = Arrival(wait)
    return InFlight(pending(buffer, arrival), arrival, waits)


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def arguments() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two results, the second one not contiguous, and latents."""
    return values(0, 2, 4, 6, 8), values(1, 2, 4, 8, 6).transpose(2, 3), values(2, 2, 4, 6, 8)


def assert_bitwise(actual: Any, expected: Any) -> None:
    """Equal types, bits, dtypes and strides; NaN equals NaN."""
    actual_leaves, actual_spec = tree_flatten(actual)
    expected_leaves, expected_spec = tree_flatten(expected)
    assert actual_spec == expected_spec
    for one, other in zip(actual_leaves, expected_leaves, strict=True):
        assert type(one) is type(other)
        if isinstance(other, torch.Tensor):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            assert one.storage_offset() == other.storage_offset()
            assert one.is_inference() == other.is_inference()
            assert torch.equal(one.isnan(), other.isnan())
            assert torch.equal(one.nan_to_num(), other.nan_to_num())
        elif isinstance(other, np.ndarray):
            np.testing.assert_array_equal(one, other)
        else:
            assert one == other


def write(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    x[index] = value
    return x


def unpickled(x: torch.Tensor) -> torch.Tensor:
    return pickle.loads(pickle.dumps(x))


def saved(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    return torch.load(file)["x"]


def rescaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What guidance rescaling does."""
    dims = list(range(1, x.ndim))
    guided = y + 7.5 * (x - y)
    factor = x.std(dim=dims, keepdim=True) / guided.std(dim=dims, keepdim=True)
    return 0.7 * (guided * factor) + 0.3 * guided


def through_out(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    torch.add(x, 1, out=z)
    return z


def autocast(function: Callable[[], Any]) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return function()


Use = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]

DEFERRED: dict[str, Use] = {
    "guidance": lambda x, y, z: y + 7.5 * (x - y),
    "guidance of halves": lambda x, y, z: (lambda u, c: u + 3 * (c - u))(*x.chunk(2)),
    "guidance in another dtype": lambda x, y, z: (y.half() + 7.5 * (x.half() - y.half())).float(),
    "three branches": lambda x, y, z: x + 2.0 * (y - x) + 0.5 * (z - y),
    "neg": lambda x, y, z: -x,
    "cast": lambda x, y, z: x.to(torch.bfloat16),
    "cast of a view": lambda x, y, z: x[:, 1:3].half(),
    "double": lambda x, y, z: x.double() * 0.1,
    "to int": lambda x, y, z: x.to(torch.int64),
    "cast there and back": lambda x, y, z: x.half().to(x.dtype),
    "type_as": lambda x, y, z: x.type_as(z.half()),
    "add int": lambda x, y, z: x.half() + 1,
    "sub": lambda x, y, z: x - y,
    "sub with alpha": lambda x, y, z: torch.sub(x, y, alpha=0.3),
    "rsub": lambda x, y, z: 1 - x,
    "rsub of tensors": lambda x, y, z: torch.rsub(x, z),
    "mul": lambda x, y, z: x * 0.18215,
    "mul with an ordinary tensor": lambda x, y, z: x * z,
    "ordinary tensor first, not contiguous": lambda x, y, z: z.view(2, 4, 8, 6).mT - x,
    "ordinary tensor first": lambda x, y, z: z - x,
    "mul with a number of higher precision": lambda x, y, z: x * torch.tensor(0.1, dtype=torch.float64),
    "mul with a tensor of higher precision": lambda x, y, z: x.half() * z,
    "mul with an integer tensor": lambda x, y, z: x.half() * torch.arange(8),
    "mul with a broadcast tensor": lambda x, y, z: x * z[:1, :, :1].expand(2, 4, 6, 8),
    "complex": lambda x, y, z: x * 1j,
    "div": lambda x, y, z: x / 3,
    "div by a step": lambda x, y, z: (z - x) / torch.tensor(0.37),
    "rdiv": lambda x, y, z: 1 / x,
    "lerp": lambda x, y, z: torch.lerp(x, y, 0.3),
    "lerp with a weight": lambda x, y, z: torch.lerp(x, z, y.sigmoid()),
    "where": lambda x, y, z: torch.where(z > 0, x, y),
    "where on itself": lambda x, y, z: torch.where(x > 0, x, 0.0),
    "clamp": lambda x, y, z: x.clamp(-0.5, 0.5),
    "clamp to tensors": lambda x, y, z: torch.clamp(x, min=z),
    "pow": lambda x, y, z: x**2,
    "sqrt": lambda x, y, z: (x**2 + y**2) ** 0.5,
    "exp": lambda x, y, z: x.exp(),
    "masked fill": lambda x, y, z: x.masked_fill(z > 0, 0.0),
    "compare": lambda x, y, z: x > y,
    "euler step": lambda x, y, z: (z.float() + (0.7 - 0.9) * (y + 5.0 * (x - y)).float()).to(torch.bfloat16),
    "cat": lambda x, y, z: torch.cat([x, y]),
    "cat twice": lambda x, y, z: torch.cat([x * 2] * 2, dim=1),
    "cat with an ordinary tensor": lambda x, y, z: torch.cat([z.double(), x], dim=-1),
    "stack": lambda x, y, z: torch.stack([x, y, z], dim=1),
    "asarray of torch": lambda x, y, z: torch.asarray(x, dtype=torch.float64),
    "clone": lambda x, y, z: y.clone(),
    "contiguous": lambda x, y, z: y.contiguous(),
    "chunk": lambda x, y, z: x.chunk(2, dim=1),
    "chunk of a sum": lambda x, y, z: (x + y).chunk(2),
    "split": lambda x, y, z: torch.split(x, [1, 3], dim=1),
    "split of a sum": lambda x, y, z: torch.split(x + 1, [1, 3], dim=1)[1] * 2,
    "unbind": lambda x, y, z: x.unbind(0),
    "unbind of a sum": lambda x, y, z: (x + y).unbind(1),
    "iteration": lambda x, y, z: [part * 2 for part in x],
    "index": lambda x, y, z: x[0, :, ::2, None],
    "index of a sum": lambda x, y, z: (x + y)[0][1:, 2],
    "view": lambda x, y, z: x.view(2, -1),
    "view as bits": lambda x, y, z: x.view(torch.int32),
    "permute": lambda x, y, z: x.permute(0, 2, 3, 1),
    "permute of a sum": lambda x, y, z: (x - y).permute(0, 2, 3, 1) * 2,
    "reshape": lambda x, y, z: x.reshape(8, 6, 8),
    "reshape with a copy": lambda x, y, z: y.reshape(-1),
    "unpacked latents": lambda x, y, z: (x * 2).view(2, 2, 2, 6, 8).permute(0, 3, 1, 4, 2).reshape(2, 12, -1),
    "expand": lambda x, y, z: x[:1].expand(3, -1, -1, -1),
    "flatten": lambda x, y, z: x.flatten(1).unsqueeze(0).squeeze(),
    "detach": lambda x, y, z: x.detach() + 1,
    "as strided": lambda x, y, z: (x + 1)[1].as_strided((2, 2), (3, 1)),
    "empty": lambda x, y, z: x[:0] * y[:0],
    "zero-dimensional": lambda x, y, z: x[0, 0, 0, 0] * z.half(),
    "zero-dimensional and a double number": lambda x, y, z: x[0, 0, 0, 0] * torch.tensor(2.0, dtype=torch.double),
    "autocast": lambda x, y, z: autocast(
        lambda: torch.cat([x.bfloat16(), z], dim=1).pow(2) + x.bfloat16().pow(2)[:, :1]
    ),
}

WAITS: dict[str, Use] = {
    "sum": lambda x, y, z: x.sum(),
    "mean of a difference": lambda x, y, z: (x - 1).mean(dim=(1, 2)),
    "std": lambda x, y, z: x.std(),
    "norm": lambda x, y, z: torch.linalg.vector_norm(x, dim=-1),
    "max": lambda x, y, z: x.max(dim=1),
    "topk": lambda x, y, z: x.topk(2),
    "quantile": lambda x, y, z: torch.quantile(x.abs().flatten(1), 0.9, dim=1),
    "item": lambda x, y, z: x[0, 1, 2, 3].item(),
    "float": lambda x, y, z: float(x[0, 1, 2, 3]),
    "bool": lambda x, y, z: bool(x[0, 0, 0, 0] > 0),
    "tolist": lambda x, y, z: x.tolist(),
    "tolist of a sum": lambda x, y, z: (x + 1).tolist(),
    "numpy": lambda x, y, z: x.numpy(),
    "asarray": lambda x, y, z: np.asarray(x * 2),
    "dlpack": lambda x, y, z: torch.from_dlpack(x),
    "numpy from dlpack": lambda x, y, z: np.from_dlpack(x),
    "cpu": lambda x, y, z: x.cpu(),
    "data": lambda x, y, z: x.data,
    "repr": lambda x, y, z: repr(x),
    "format": lambda x, y, z: f"{x} {x[0, 0, 0, 0]:.3f}",
    "equal": lambda x, y, z: torch.equal(x, z),
    "allclose": lambda x, y, z: torch.allclose(x, x + 1e-9),
    "contains": lambda x, y, z: 0.0 in x,
    "any": lambda x, y, z: (x.isnan()).any(),
    "matmul": lambda x, y, z: x @ z.transpose(-1, -2),
    "linear": lambda x, y, z: torch.nn.functional.linear(x, z[0, 0], z[0, 0, :, 0]),
    "conv": lambda x, y, z: torch.nn.functional.conv2d(x, z),
    "autocast matmul": lambda x, y, z: autocast(lambda: x @ z.transpose(-1, -2)),
    "softmax": lambda x, y, z: x.softmax(-1),
    "attention": lambda x, y, z: torch.nn.functional.scaled_dot_product_attention(x, x, z),
    "interpolate": lambda x, y, z: torch.nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "deepcopy": lambda x, y, z: copy.deepcopy(x),
    "copy": lambda x, y, z: copy.copy(x),
    "pickle": lambda x, y, z: unpickled(x),
    "save": lambda x, y, z: saved(x),
    "index by tensor": lambda x, y, z: x[:, torch.tensor([2, 0])],
    "index by mask": lambda x, y, z: x[x > 0],
    "mask for another": lambda x, y, z: z[x > 0],
    "index_select": lambda x, y, z: x.index_select(1, torch.tensor([2, 0])),
    "add_": lambda x, y, z: x.add_(1),
    "iadd": lambda x, y, z: x.__iadd__(z),
    "write": lambda x, y, z: write(x, (slice(None), 0), z[:, 1]),
    "write by mask": lambda x, y, z: write(x, z > 0, 0.0),
    "write below a view": lambda x, y, z: (x[0].mul_(2), x),
    "write below a view of a sum": lambda x, y, z: (lambda s: (s[0].mul_(2), s, x))(x + 1),
    "deferred before a write": lambda x, y, z: (x * 2, x.zero_()),
    "write to a copy": lambda x, y, z: (x.clone().zero_(), x.sum()),
    "zero_": lambda x, y, z: x.zero_(),
    "copy_ into it": lambda x, y, z: x.copy_(z),
    "copy_ out of it": lambda x, y, z: (z.copy_(x), z),
    "copy_ of a difference": lambda x, y, z: (z[:, 0].copy_((x - 1)[:, 0]), z),
    "add to an ordinary tensor": lambda x, y, z: (z.add_(x, alpha=0.5), z),
    "write into an ordinary tensor": lambda x, y, z: write(z, 0, x[1]),
    "write a number into an ordinary tensor": lambda x, y, z: write(z, (0, 0, 0, 0), x[1, 1, 1, 1]),
    "out": lambda x, y, z: through_out(x, z),
    "out with a new shape": lambda x, y, z: through_out(x, torch.empty(0)),
    "out is it": lambda x, y, z: (torch.add(z, 1, out=x), x),
    "unsqueeze_": lambda x, y, z: (x.unsqueeze_(0), list(x.shape), x + 1, torch.zeros_like(x)),
    "set data": lambda x, y, z: (setattr(x, "data", z[0].half()), x + 1),
    "storage": lambda x, y, z: x[1].untyped_storage().tolist(),
    "typed storage": lambda x, y, z: list(x.storage()),
    "nbytes of the storage": lambda x, y, z: x.untyped_storage().nbytes(),
    "shared": lambda x, y, z: (x.is_shared(), x.sum()),
    "apply_": lambda x, y, z: x.apply_(lambda number: number * 2),
    "map_": lambda x, y, z: x.map_(z, lambda a, b: a - b),
    "from numbers": lambda x, y, z: torch.tensor([x[0, 0, 0, 0], x[0, 0, 0, 1]]),
    "as_tensor of numpy": lambda x, y, z: torch.as_tensor(x.numpy()),
    "floor div": lambda x, y, z: x // 0.1,
    "full": lambda x, y, z: torch.full((2,), x[0, 0, 0, 0]),
    "python functions": lambda x, y, z: torch.nn.functional.normalize(x, dim=1)[0],
    "norm method": lambda x, y, z: x.norm(dim=1),
    "unique": lambda x, y, z: x.unique(),
    "pixel shuffle": lambda x, y, z: torch.nn.functional.pixel_shuffle(x, 2),
    "einsum": lambda x, y, z: torch.einsum("nchw,nchv->nwv", x, z),
    "group norm": lambda x, y, z: torch.nn.functional.group_norm(x, 2),
    "index_put": lambda x, y, z: z.index_put((torch.tensor([0]),), x[:1]),
    "integers divided": lambda x, y, z: (x * 10).to(torch.int64) // 3,
    "foreach": lambda x, y, z: torch._foreach_add([x, z], 1),
    "cumsum": lambda x, y, z: x.cumsum(1),
    "where without values": lambda x, y, z: torch.where(x > 0),
    "complex flags": lambda x, y, z: (x * 1j).conj().imag,
}

WAITS_FOR_BOTH: dict[str, Use] = {
    "rescaled guidance": lambda x, y, z: rescaled(x, y),
    "sum of both": lambda x, y, z: (x + y).sum(),
    "difference before a write to one": lambda x, y, z: (lambda d: (x.zero_(), d, d.sum()))(x - y),
    "difference before a write to the other": lambda x, y, z: (lambda d: (y.zero_(), x.sum(), d, d.sum()))(x - y),
    "write of one into the other": lambda x, y, z: (x.copy_(y), x, y),
    "momentum": lambda x, y, z: (lambda d: (z.mul_(0.9).add_(d), d))(x - y),
    "cat, then a write below it": lambda x, y, z: (lambda c: (c[0].zero_(), c, x))(torch.cat([x, y])),
}

WAITS_IN_INFERENCE_MODE: dict[str, Use] = {
    "new_tensor": lambda x, y, z: z.new_tensor(x),
    "tensor": lambda x, y, z: torch.tensor(x[0, 0, 0, 0]),
}

FACTORIES: dict[str, Use] = {
    "zeros_like": lambda x, y, z: torch.zeros_like(y),
    "zeros_like of a sum": lambda x, y, z: torch.zeros_like(y + x),
    "ones_like in another dtype": lambda x, y, z: torch.ones_like(x, dtype=torch.int64),
    "full_like": lambda x, y, z: torch.full_like(x[0], 3.5),
    "randn_like": lambda x, y, z: (torch.manual_seed(3), torch.randn_like(x * 2))[1],
    "rand_like": lambda x, y, z: (torch.manual_seed(3), torch.rand_like(y))[1],
    "randint_like": lambda x, y, z: (torch.manual_seed(3), torch.randint_like(x, 10))[1],
    "new_zeros": lambda x, y, z: x.new_zeros(3, 2),
    "new_full": lambda x, y, z: x.half().new_full((3,), 2),
    "new_ones": lambda x, y, z: x.new_ones((3,), dtype=torch.bool),
    "shape of empty_like": lambda x, y, z: (torch.empty_like(y).zero_(), torch.empty_like(x + y).zero_()),
    "shape of new_empty": lambda x, y, z: x.new_empty(5).shape,
}


ALL = {**DEFERRED, **WAITS, **WAITS_FOR_BOTH, **WAITS_IN_INFERENCE_MODE, **FACTORIES}


class Run(NamedTuple):
    """How a use went on pending tensors: waits for both arguments, and the leaves of its result, before any other use."""

    waits: tuple[int, int]
    types: list[type]
    pending: list[bool]


def compare(use: Use) -> Run:
    """Run `use` in eager and on pending tensors; results, and what has become of the arguments, have to be the same."""
    x, y, z = arguments()
    expected = use(x, y, z)
    one, two = (in_flight(argument) for argument in arguments()[:2])
    other = arguments()[2]
    result = use(one.tensor, two.tensor, other)
    leaves = tree_flatten(result)[0]
    run = Run((len(one.waits), len(two.waits)), [type(leaf) for leaf in leaves], [is_pending(leaf) for leaf in leaves])
    assert_bitwise(resolved(result), expected)
    assert_bitwise(resolved([one.tensor, two.tensor, other]), [x, y, z])
    assert (len(one.waits), len(two.waits)) == (1, 1)
    return run


@pytest.mark.parametrize("name", DEFERRED)
def test_operations_on_values_stay_pending(name: str) -> None:
    run = compare(DEFERRED[name])
    assert run.waits == (0, 0)
    assert run.pending
    assert all(run.pending)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", WAITS)
def test_other_uses_wait_for_the_tensor_they_use(name: str) -> None:
    run = compare(WAITS[name])
    assert run.waits == (1, 0)
    assert not any(run.pending)


@pytest.mark.parametrize("name", WAITS_FOR_BOTH)
def test_uses_of_several_results_wait_for_all_of_them(name: str) -> None:
    assert compare(WAITS_FOR_BOTH[name]).waits == (1, 1)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("name", WAITS_IN_INFERENCE_MODE)
def test_copies_by_torch_tensor_wait_in_inference_mode_only(name: str) -> None:
    assert compare(WAITS_IN_INFERENCE_MODE[name]).waits == (int(torch.is_inference_mode_enabled()), 0)


@pytest.mark.parametrize("name", FACTORIES)
def test_new_tensors_like_a_pending_one_are_ordinary_at_once(name: str) -> None:
    run = compare(FACTORIES[name])
    assert run.waits == (0, 0)
    assert PendingTensor not in run.types


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:To copy construct from a tensor")
@pytest.mark.parametrize("name", ALL)
def test_results_are_ordinary_once_the_data_is_there(name: str) -> None:
    use = ALL[name]
    expected = use(*arguments())
    one, two = (in_flight(argument) for argument in arguments()[:2])
    one.arrival.wait()
    two.arrival.wait()
    result = use(one.tensor, two.tensor, arguments()[2])
    given = (one.tensor, two.tensor)
    leaves = [leaf for leaf in tree_flatten(result)[0] if not any(leaf is tensor for tensor in given)]
    assert not any(isinstance(leaf, PendingTensor) for leaf in leaves)
    assert_bitwise(resolved(result), expected)


def test_shape_dtype_and_device_are_known_at_once() -> None:
    x = values(0, 2, 4, 6)
    flight = in_flight(x)
    for tensor, like in (flight.tensor, x), (flight.tensor.half()[0].T * 2, x.half()[0].T * 2):
        assert isinstance(tensor, torch.Tensor)
        assert (tensor.shape, tensor.dtype, tensor.device) == (like.shape, like.dtype, like.device)
        assert (tensor.stride(), tensor.numel(), tensor.ndim, len(tensor)) == (
            like.stride(),
            like.numel(),
            2 + (like is x),
            len(like),
        )
        assert tensor.is_contiguous() == like.is_contiguous()
        assert tensor.is_floating_point()
        assert tensor.element_size() == like.element_size()
    assert not flight.waits


def test_impossible_operations_are_refused_where_they_are_written() -> None:
    x = in_flight(values(0, 2, 4))
    with pytest.raises(RuntimeError, match="must match the size"):
        x.tensor + torch.zeros(3)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        torch.div(in_flight(torch.arange(4)).tensor, torch.zeros(4, dtype=torch.int64), rounding_mode="floor")


def test_ordinary_operands_may_be_written_to_before_the_data_is_there() -> None:
    x, z, sigma = values(0, 2, 4), values(1, 2, 4), torch.tensor(0.5)
    expected = z - sigma * x
    result = z - sigma * in_flight(x).tensor
    z.zero_()
    sigma.zero_()
    assert_bitwise(resolved(result), expected)


@pytest.mark.parametrize("write_through", ["tensor", "view", "resolved", "buffer view"])
def test_a_write_after_one_of_two_arrivals_leaves_what_was_deferred(write_through: str) -> None:
    x, y = values(0, 2, 4), values(1, 2, 4)
    expected = x - y, (x + 1) * y, x + y
    one, two = in_flight(x), in_flight(y)
    view, plus = one.tensor[:], one.tensor + 1
    results = one.tensor - two.tensor, plus * two.tensor
    one.arrival.wait()
    results = *results, one.tensor + two.tensor
    target = {"tensor": one.tensor, "view": view, "resolved": resolved(one.tensor), "buffer view": one.tensor.view(-1)}
    target[write_through].zero_()
    plus.zero_()
    assert all(is_pending(result) for result in results)
    assert_bitwise(resolved(results), expected)


def test_what_was_deferred_runs_as_soon_as_the_arrival_is_there() -> None:
    x = values(0, 2, 4)
    flight = in_flight(x)
    double = flight.tensor * 2
    flight.arrival.wait()
    flight.tensor.zero_()
    assert not is_pending(double)
    assert_bitwise(double + 0, x * 2 + 0)


def test_views_alias_their_base_before_and_after_the_data_is_there() -> None:
    x = values(0, 2, 4)
    for base in in_flight(x).tensor, in_flight(x).tensor * 2:
        view, expected = base[0], resolved(base.clone())
        view.add_(1)
        base[1].sub_(1)
        expected[0].add_(1)
        expected[1].sub_(1)
        assert_bitwise(resolved(base), expected)
        assert resolved(view).untyped_storage().data_ptr() == resolved(base).untyped_storage().data_ptr()


def test_writes_count_as_versions_of_the_real_tensor() -> None:
    """So that a stage that reads it later can tell."""
    if torch.is_inference_mode_enabled():
        with pytest.raises(RuntimeError, match="do not track version"):
            _ = in_flight(values(0, 2, 4)).tensor._version
        return
    tensor = in_flight(values(0, 2, 4)).tensor
    view = tensor[0]
    versions = [resolved(tensor[1])._base._version]
    for target in tensor, view, tensor[:, 1], resolved(view):
        target.add_(1)
        versions.append(resolved(tensor)._version)
    assert versions == sorted(set(versions))
    waiting = in_flight(values(0, 2, 4)).tensor
    waiting[1].add_(1)
    assert waiting._version == 2  # The transfer wrote into the buffer, too.


def test_waiting_happens_exactly_once() -> None:
    flight = in_flight(values(0, 2, 4))
    assert (flight.arrival.done, is_pending(flight.tensor), is_pending(flight.tensor[0])) == (False, True, True)
    flight.arrival.wait()
    flight.arrival.wait()
    flight.tensor.sum()
    assert (flight.arrival.done, is_pending(flight.tensor), len(flight.waits)) == (True, False, 1)


def test_a_failed_wait_fails_each_time_with_the_same_error() -> None:
    calls = []

    def wait() -> None:
        calls.append(None)
        raise ConnectionError("rank 1 has gone")

    arrival = Arrival(wait)
    tensor = pending(torch.full((2,), float("nan")), arrival)
    double = tensor * 2
    errors = []
    for use in (lambda: tensor.sum(), lambda: double.tolist(), arrival.wait, lambda: resolved([double])):
        with pytest.raises(ConnectionError, match="rank 1") as caught:
            use()
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 1
    assert len(calls) == 1
    assert not arrival.done


def test_results_that_came_before_a_failure_stay_right() -> None:
    x = values(0, 2, 4)
    good = in_flight(x)
    bad = pending(torch.zeros(2, 4), Arrival(lambda: 1 / 0))
    double = good.tensor * 2
    with pytest.raises(ZeroDivisionError):
        (good.tensor + bad).sum()
    good.tensor.zero_()
    assert_bitwise(resolved(double), x * 2)


def test_data_cannot_be_asked_for_by_what_waits_for_it() -> None:
    tensors: list[torch.Tensor] = []
    tensors.append(pending(torch.zeros(2), Arrival(lambda: tensors[0].sum())))
    with pytest.raises(RuntimeError, match="by what waits for that data"):
        tensors[0].sum()


def test_gradients_are_refused() -> None:
    with torch.inference_mode(False), torch.enable_grad():
        weight = torch.nn.Parameter(torch.ones(4))
        flight = in_flight(values(0, 2, 4))
        with torch.no_grad():
            without_gradient = flight.tensor * weight
        for use in (lambda: flight.tensor * weight, lambda: flight.tensor @ weight):
            with pytest.raises(SplitError, match=r"run the pipeline under torch\.no_grad"):
                use()
        assert not flight.waits
    assert not resolved(without_gradient).requires_grad


def test_the_modes_of_the_waiting_place_do_not_matter() -> None:
    x, z = values(0, 2, 4), values(1, 2, 4)

    def use(a: torch.Tensor) -> list[torch.Tensor]:
        return [torch.cat([a.half(), z.half()]), a.half().pow(2), a[0] + z.double(), (a + 1)[0]]

    expected = use(x)
    for other in torch.inference_mode(not torch.is_inference_mode_enabled()), torch.enable_grad(), nullcontext():
        flight = in_flight(x)
        results = use(flight.tensor)
        with other, torch.autocast("cpu", dtype=torch.bfloat16):
            flight.arrival.wait()
        assert_bitwise(resolved(results), expected)


def test_structures_keep_their_types_and_everything_arrives_before_anything_runs() -> None:
    x, y = values(0, 2, 4), values(1, 2)
    order: list[str] = []
    first = pending([torch.zeros(2, 4)], Arrival(lambda: order.append("first")))
    second = pending(torch.zeros(2), Arrival(lambda: order.append("second")))
    resolved({"a": first, "b": (second,)})
    assert order == ["first", "second"]
    buffers = {"output": Transformer2DModelOutput(sample=torch.zeros(2, 4)), "rest": (torch.zeros(2), [None, 3])}

    def wait() -> None:
        buffers["output"].sample.copy_(x)
        buffers["rest"][0].copy_(y)

    structure = pending(buffers, Arrival(wait))
    assert isinstance(structure["output"], Transformer2DModelOutput)
    assert is_pending(structure["output"].sample)
    assert is_pending(structure["rest"][0])
    assert structure["rest"][1] == [None, 3]
    real = resolved(structure)
    assert isinstance(real["output"], Transformer2DModelOutput)
    assert_bitwise((real["output"].sample, real["rest"]), (x, (y, [None, 3])))
    assert resolved(real) is real
    assert resolved(structure["output"].sample) is buffers["output"].sample


def test_ordinary_values_are_not_pending() -> None:
    assert not any(is_pending(value) for value in (torch.zeros(2), None, 3, [in_flight(torch.zeros(2)).tensor]))


def test_an_arrival_keeps_nothing_alive() -> None:
    class Transfer:
        def wait(self) -> None:
            pass

    transfer = Transfer()
    held = weakref.ref(transfer)
    arrival = Arrival(transfer.wait)
    tensor = pending(torch.ones(2), arrival)
    del transfer
    gc.collect()
    assert held() is not None
    results = [tensor * 2, (tensor + 1)[0]]
    arrival.wait()
    gc.collect()
    assert held() is None
    references = [weakref.ref(thing) for thing in (arrival, resolved(tensor), tensor, *resolved(results))]
    del arrival, tensor, results
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def test_code_that_goes_around_torch_gets_an_error_and_no_wrong_data() -> None:
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(in_flight(values(0, 2, 4)).tensor)


def test_results_that_nobody_holds_are_not_computed() -> None:
    flight = in_flight(values(0, 2, 4))
    operand = torch.ones(2, 4)
    dropped = flight.tensor + operand
    source = weakref.ref(dropped._source)
    del dropped
    gc.collect()
    assert source() is None
    assert not flight.waits


SIZES = 2, 4, 4

STEPS: dict[str, Callable[[list[torch.Tensor], int, int, float], Any]] = {
    "add": lambda t, i, j, a: t.append(t[i] + t[j]),
    "guide": lambda t, i, j, a: t.append(t[i] + a * (t[j] - t[i])),
    "scale": lambda t, i, j, a: t.append(t[i] * a),
    "step": lambda t, i, j, a: t.append(t[i] - torch.tensor(a, dtype=torch.float64) * t[j]),
    "half": lambda t, i, j, a: t.append(t[i].half()),
    "float": lambda t, i, j, a: t.append(t[i].float()),
    "lerp": lambda t, i, j, a: t.append(torch.lerp(t[i].float(), t[j].float(), a)),
    "where": lambda t, i, j, a: t.append(torch.where(t[i] > a, t[i], t[j])),
    "transpose": lambda t, i, j, a: t.append(t[i].transpose(1, 2)),
    "view": lambda t, i, j, a: t.append(t[i][:]),
    "flip halves": lambda t, i, j, a: t.append(torch.cat(t[i].chunk(2, dim=1)[::-1], dim=1)),
    "regroup": lambda t, i, j, a: t.append(t[i].reshape(4, 2, 4).permute(1, 0, 2)),
    "stack": lambda t, i, j, a: t.append(torch.stack([t[i][0], t[j][1]])),
    "expand": lambda t, i, j, a: t.append(t[i][:1].expand(*SIZES)),
    "clone": lambda t, i, j, a: t.append(t[i].clone()),
    "mean": lambda t, i, j, a: t.append(t[i] - t[j].mean(dim=0)),
    "add in place": lambda t, i, j, a: None if 0 in t[i].stride() else t[i].add_(t[j].clone()),
    "add in place to a row": lambda t, i, j, a: None if 0 in t[i].stride() else t[i][0].add_(a),
    "write a column": lambda t, i, j, a: None if 0 in t[i].stride() else t[i][:, 1].copy_(t[j][:, 2].clone()),
    "write zeros": lambda t, i, j, a: None if 0 in t[i].stride() else t[i][:, :, 3].zero_(),
    "resolve": lambda t, i, j, a: t.__setitem__(i, resolved(t[i])),
    "look at": lambda t, i, j, a: float(t[i][0, 1, 2]),
}

CHAINS = st.lists(
    st.tuples(
        st.sampled_from(sorted(STEPS)), st.integers(0, 31), st.integers(0, 31), st.sampled_from([0.5, -1.5, 3.0, 0.1])
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(chain=CHAINS)
@pytest.mark.parametrize("inference", [False, True])
def test_random_chains_give_what_eager_gives(inference: bool, chain: list[tuple[str, int, int, float]]) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        data = [values(seed, *SIZES) for seed in range(4)]
        eager = [tensor.clone() for tensor in data]
        flights = [in_flight(tensor) for tensor in data[:3]]
        chained = [*(flight.tensor for flight in flights), data[3].clone()]
        for name, i, j, number in chain:
            for tensors in eager, chained:
                STEPS[name](tensors, i % len(tensors), j % len(tensors), number)
        assert [(t.shape, t.stride(), t.dtype) for t in chained] == [(t.shape, t.stride(), t.dtype) for t in eager]
        assert_bitwise(resolved(chained), eager)
        assert [len(flight.waits) for flight in flights] == [1, 1, 1]
