"""Components that live on one rank: text and image encoders, VAEs. Their calls run there and return everywhere.

[Note: owned components]
Every rank has a module of the component's class, with its configuration and attributes; only the owner's has weights. A
call (the forward, `encode`, `decode`, `generate`, ...) is made on every rank with the same arguments. The owner runs it
there and then, in the thread and the random state of the request, which is what one process does; then every rank gives
its turn to the other requests, and takes the result when it is its turn again. So while the owner decodes one request,
others' calls that are in flight go on, and no rank but the owner waits for the decoding.

What else a call changes travels with the result: torch's random state, and that of generators among the arguments. An
exception travels too, and is raised on every rank. A distribution (`latent_dist`) travels as its tensors, so each rank
samples it with its own generator. A submodule that is called from outside (CLIP's final norm by Kandinsky) is a component
in its own right as soon as it is reached.
"""

import functools
import inspect
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dit_pipelining.comm.components import OwnerLinks
from dit_pipelining.comm.links import Work
from dit_pipelining.comm.packing import Packed, pack, tensor_in, unpack
from dit_pipelining.errors import ConfigError
from dit_pipelining.runtime.pending import resolved
from dit_pipelining.runtime.rolling import Rolling
from dit_pipelining.runtime.turns import OtherRequestFailedError, RequestCancelledError, random_state, set_random_state
from dit_pipelining.runtime.withheld import refuse_withheld, withheld
from dit_pipelining.torch_internals import parse_to, tree_flatten

OWNED = "_dit_pipelining_owned"

COMPUTES = re.compile(
    r"(^|_)(forward|encode|decode|generate|sample|denoise|quantize|features?|tokens|codes|indices|logits)(_|$)"
)
"""Names of public methods that compute; all others (switches, configuration) act on each rank's own module."""

DECODES = re.compile(r"(^|_)(forward|decode|denoise)(_|$)")
"""Names of a decoder's methods whose results only ranks that return results need."""

RECEIVES, SENDS = 0, 1
"""Order in which transfers that nobody waits for any more are finished; the other way round, two owners would hang."""

Call = Callable[..., Any]


class OwnedComponent:
    """Runs the calls of one component on its owner.

    Args:
        name: of the component in its pipeline, for messages.
        links: of its owner.
        rank: of this process.
        is_decoder: whether it makes what the pipeline returns.
        output_ranks: those that return results.
        rolling: the pipeline's runtime.
    """

    def __init__(
        self, name: str, links: OwnerLinks, rank: int, is_decoder: bool, output_ranks: tuple[int, ...], rolling: Rolling
    ) -> None:
        self.name = name
        self.links = links
        self.rank = rank
        self.is_decoder = is_decoder
        self.output_ranks = output_ranks
        self.rolling = rolling
        self.running = False

    @property
    def is_owner(self) -> bool:
        return self.links.owner == self.rank

    @property
    def device(self) -> torch.device:
        return self.links.device

    def call(self, method: str, function: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One call of a method: on the owner `function` itself, elsewhere its result.

        Raises:
            BaseException: what it raised on the owner.
        """
        if self.running:
            return function(*args, **kwargs)
        args, kwargs = resolved(args), resolved(dict(kwargs))
        self.rolling.guard.check()
        self.rolling.guard.count_step()
        shows = self.is_decoder and DECODES.search(method) is not None
        audience = self.links.outputs if shows else self.links.everyone
        if not self.is_owner:
            self._end_turn(RECEIVES, self._discard)
            message, flats = self._receive()
            return self._take(message, flats, args, kwargs)
        message, flats, error, result = self._run(function, args, kwargs)
        message["shows"] = shows
        with self._watched():
            works = self.links.send(message, flats, audience)
        self._end_turn(SENDS, lambda: self._finish(works))
        self._finish(works)
        if error is not None:
            raise error
        if shows and self.rank not in self.output_ranks:
            return unpack(message["result"], lambda layout: withheld(layout, self.device))
        return result

    def _run(self, function: Call, args: Any, kwargs: Any) -> tuple[dict[str, Any], list[Any], Exception | None, Any]:
        """Run the function; what to tell the others, tensors that go with it, and what it raised or returned."""
        before, seeds = random_state(), [generator.get_state() for generator in _generators(args, kwargs)]
        message: dict[str, Any] = {}
        flats: list[torch.Tensor] = []
        result = None
        self.running = True
        try:
            refuse_withheld(f"the component {self.name!r}", args, kwargs)
            result = function(*args, **kwargs)
            message["result"], flats = pack(result)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # see [Note: order on the groups of components]
            error = None
        except Exception as raised:
            error = raised
            message["error"] = _portable(error, self.name, self.rank)
        finally:
            self.running = False
        after = random_state()
        message["random"] = after if _differ(before, after) else None
        states = [generator.get_state() for generator in _generators(args, kwargs)]
        message["seeds"] = states if _differ(seeds, states) else None
        return message, flats, error, result

    def _receive(self) -> tuple[dict[str, Any], list[torch.Tensor] | None]:
        """The owner's next message, and the bytes of the result; None if there are none for this rank."""
        with self._watched():
            message = self.links.receive_header()
            audience = self.links.outputs if message["shows"] else self.links.everyone
            if "result" not in message or self.rank not in audience.ranks:
                return message, None
            return message, self.links.receive(message["result"].parts, audience)

    def _discard(self) -> None:
        self._receive()

    def _finish(self, works: Sequence[Work]) -> None:
        with self._watched():
            for work in works:
                work.wait()

    def _take(self, message: dict[str, Any], flats: list[torch.Tensor] | None, args: Any, kwargs: Any) -> Any:
        if message["random"] is not None:
            set_random_state(message["random"])
        if message["seeds"] is not None:
            for generator, state in zip(_generators(args, kwargs), message["seeds"], strict=True):
                generator.set_state(state)
        if "error" in message:
            raise message["error"]
        packed: Packed = message["result"]
        if flats is None:
            return unpack(packed, lambda layout: withheld(layout, self.device))
        return unpack(packed, tensor_in(flats))

    def _end_turn(self, order: int, finish: Callable[[], None]) -> None:
        """Let the others run. A request that ends here leaves no transfer behind.

        If another one fails, `finish` waits for `Rolling.drain`, which comes when all ranks have failed alike. A cancelled
        request has its turn, in order with those after it.
        """
        turns = self.rolling.turns
        turns.current().submitted += 1
        try:
            turns.end_turn()
        except OtherRequestFailedError:
            self.rolling.unfinished.append((order, finish))
            raise
        except RequestCancelledError:
            finish()
            raise

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """What goes wrong with a transfer ends the run."""
        try:
            yield
        except Exception as error:
            raise self.rolling.guard.fail(error) from None


def own(module: nn.Module, component: OwnedComponent) -> None:
    """Send calls of a module to the component's owner; its class, configuration and attributes stay what they are."""
    module.__dict__[OWNED] = component
    cls: Any = type(module)
    module.__class__ = _owned_class(cls)
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        for child in module.children():
            _own_reached(child, component)


def is_owned(module: Any) -> bool:
    """Whether calls of this module run on one rank."""
    return OWNED in getattr(module, "__dict__", {})


def _own_reached(module: nn.Module, component: OwnedComponent) -> None:
    if not component.running and not is_owned(module):
        own(module, component)


@functools.cache
def _owned_class(cls: Any) -> Any:
    def device(self: nn.Module) -> torch.device:
        found: OwnedComponent = self.__dict__[OWNED]
        return found.device

    def getattribute(self: nn.Module, name: str) -> Any:
        value = cls.__getattr__(self, name)
        if isinstance(value, nn.Module):
            _own_reached(value, self.__dict__[OWNED])
        return value

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        target, dtype = parse_to(*args, **kwargs)
        _check_device(self, target)
        if dtype is not None:
            cls.to(self, dtype=dtype)
        return self

    def cpu(self: nn.Module) -> nn.Module:
        return to(self, "cpu")

    def cuda(self: nn.Module, device: Any = None) -> nn.Module:
        return to(self, "cuda" if device is None else torch.device("cuda", device) if type(device) is int else device)

    members: dict[str, Any] = {
        "device": property(device),
        "__getattr__": getattribute,
        "to": to,
        "cpu": cpu,
        "cuda": cuda,
        "__module__": cls.__module__,
        **{
            name: refusal(name, advice)
            for name, advice in REFUSED.items()
            if name.startswith("__") or hasattr(cls, name)
        },
    }
    members.update({name: _owned_method(cls, name) for name in dir(cls) if _computes(cls, name)})
    return type(cls.__name__, (cls,), members)


def _computes(cls: type, name: str) -> bool:
    if name.startswith("_") or (name != "forward" and hasattr(nn.Module, name)):
        return False
    return COMPUTES.search(name) is not None and inspect.isfunction(inspect.getattr_static(cls, name))


def _owned_method(cls: Any, name: str) -> Any:
    method = getattr(cls, name)

    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        component: OwnedComponent = self.__dict__[OWNED]
        return component.call(name, method.__get__(self), args, kwargs)

    return call


def _check_device(module: nn.Module, target: torch.device | None) -> None:
    component: OwnedComponent = module.__dict__[OWNED]
    here = component.device
    if target is not None and target != here and not (target.type == here.type and target.index is None):
        raise ConfigError(
            f"the component {component.name!r} lives on rank {component.links.owner} and stays on its device; it cannot be "
            f"moved to {target}. ParallelConfig(component_ranks=...) chooses the rank."
        )


REFUSED = {
    "__deepcopy__": "A copy would need ranks of its own: load the pipeline again, or use the same component in both.",
    "__reduce_ex__": "Weights of a split pipeline lie on different ranks: copy the folder it was loaded from.",
    "save_pretrained": "Weights of a split pipeline lie on different ranks: copy the folder it was loaded from.",
    "enable_group_offload": "Ranks keep their part on their device: use more ranks instead.",
}
"""What no part of a split pipeline can do, and what to do instead."""


def refusal(name: str, advice: str) -> Any:
    """A method that raises a ConfigError."""

    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise ConfigError(f"{name} of a {type(self).__name__} that is spread over ranks is not possible. {advice}")

    return refuse


def _generators(*values: Any) -> list[torch.Generator]:
    leaves, _ = tree_flatten(values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]


def _differ(one: Any, other: Any) -> bool:
    pairs = zip(tree_flatten(one)[0], tree_flatten(other)[0], strict=True)
    return any(before is not after and not torch.equal(before, after) for before, after in pairs)


def _portable(error: Exception, name: str, rank: int) -> Exception:
    """The error as other ranks can raise it: of the same type where that can be rebuilt from what is pickled."""
    note = f"raised by the component {name!r} on rank {rank}"
    try:
        copy: Exception = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(note)
    return copy
