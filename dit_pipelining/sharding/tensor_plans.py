"""Which layers of a transformer's blocks are cut for tensor parallelism, and along which dimension: plans as data.

[Note: one cut per sub-layer]
Attention and feed-forward are cut as in Megatron-LM (Shoeybi et al. 2019): the projections that make heads, or the hidden
width, by their outputs ("column"), the projection that joins them by its inputs ("row"). A rank then computes its own heads
and its own part of the hidden width, and one sum over the ranks after each row-wise layer gives all of them the whole
result. Everything else of a block (modulation, norms over the model's width) is small and stays whole on every rank.

Where diffusers gives a class a `_tp_plan`, that plan is taken. For the others a plan is made from the modules of the blocks,
by the names that `tensor_names` knows.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from dit_pipelining.errors import ConfigError
from dit_pipelining.sharding.tensor_names import (
    COLUMN_LAYERS,
    COUNTS_OF_HEADS,
    FEED_FORWARD,
    HEADS,
    HIDDEN_WIDTHS,
    KEYS,
    MORE_COUNTS,
    NORMS_OF_HEADS,
    PROCESSORS,
    QUERIES,
    REFUSED,
    ROTARY,
    ROW_LAYERS,
    Rotary,
)

Style = Literal["column", "row", "norm"]


@dataclass(frozen=True)
class LayerCut:
    """How one layer is cut.

    Attributes:
        style: `"column"`: by outputs; `"row"`: by inputs; `"norm"`: a norm over all heads.
        parts: sizes of the stretches that are each cut evenly: more than one where a layer makes or takes several things
            side by side. They sum to the dimension that is cut.
    """

    style: Style
    parts: tuple[int, ...]


@dataclass(frozen=True)
class TensorPlan:
    """How a transformer is cut.

    Attributes:
        layers: by name of the linear layer or norm.
        counts: by name of a module, its attributes that are divided: numbers of heads, and of channels of all heads.
        rotary: by name of an attention module, its arguments that are cut as heads are.
        units: what has to divide by the number of ranks: heads, and sizes of stretches.
    """

    layers: Mapping[str, LayerCut]
    counts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rotary: Mapping[str, Rotary] = field(default_factory=dict)
    units: Mapping[str, int] = field(default_factory=dict)

    def sizes(self) -> list[int]:
        """The numbers of ranks over which the transformer can be cut."""
        largest = math.gcd(*self.units.values())
        return [size for size in range(1, largest + 1) if largest % size == 0]

    def cut_tensors(self) -> frozenset[str]:
        """Names of the tensors of which each rank holds a part; what is cut by inputs keeps its bias whole."""
        weights = {f"{name}.weight" for name in self.layers}
        return frozenset(weights | {f"{name}.bias" for name, cut in self.layers.items() if cut.style != "row"})


def tensor_plan(model: nn.Module, blocks: Sequence[str]) -> TensorPlan:
    """The plan of a transformer, with weights or without.

    Args:
        model: the transformer.
        blocks: names of its blocks.

    Raises:
        ConfigError: there is none; names the module for which it is missing, and why.
    """
    _refuse_known("", type(model).__name__, model, model)
    given = getattr(model, "_tp_plan", None)
    plan = _from_diffusers(model, given) if given else _from_modules(model, blocks)
    if not plan.layers:
        raise ConfigError(
            f"tensor_parallel_size: the blocks of {type(model).__name__} have no attention that is known to work on a part of "
            "its heads. Use pipeline_parallel_size, or give the class a `_tp_plan` as diffusers' own have it."
        )
    for name in plan.layers:
        layer = model.get_submodule(name)
        if plan.layers[name].style != "norm" and type(layer) is not nn.Linear:
            raise ConfigError(
                f"tensor_parallel_size: {name} of {type(model).__name__} is a {type(layer).__name__}, and only plain linear "
                "layers can be cut. Load the model unquantised and without adapters."
            )
    return plan


# ---- diffusers' own plans -----------------------------------------------------------------------------------------------


def _from_diffusers(model: nn.Module, given: Mapping[str, Any]) -> TensorPlan:
    """Translate a `_tp_plan`: names with one `*` for the members of a list, and a style for each."""
    layers: dict[str, LayerCut] = {}
    units: dict[str, int] = {}
    for pattern, style in given.items():
        for name in _matching(model, pattern):
            layer = model.get_submodule(name)
            layers[name] = _translated(name, layer, style)
            units.update({f"{name} ({size})": size for size in layers[name].parts})
            owner = model.get_submodule(name.rpartition(".")[0])
            if isinstance(heads := getattr(owner, "heads", None), int):
                units[f"{name.rpartition('.')[0]}.heads ({heads})"] = heads
    return TensorPlan(layers, units=units)


def _matching(model: nn.Module, pattern: str) -> Iterator[str]:
    before, star, after = pattern.partition("*")
    if not star:
        yield pattern
        return
    for key, _ in model.get_submodule(before.strip(".")).named_children():
        yield f"{before}{key}{after}"


def _translated(name: str, layer: nn.Module, style: Any) -> LayerCut:
    kind: Style = "row" if style == "rowwise" or "Rowwise" in type(style).__name__ else "column"
    size = _size(layer, kind)
    if isinstance(style, str):
        if style not in ("colwise", "rowwise"):
            raise ConfigError(
                f"tensor_parallel_size: `_tp_plan` gives {name} the style {style!r}; expected 'colwise' or 'rowwise'."
            )
        return LayerCut(kind, (size,))
    attribute = "_tp_packed_row_blocks" if kind == "row" else "_tp_packed_col_blocks"
    shares = style.blocks if style.blocks is not None else getattr(layer, attribute)
    return LayerCut(kind, tuple(share * size // sum(shares) for share in shares))


# ---- plans made from modules --------------------------------------------------------------------------------------------


def _from_modules(model: nn.Module, blocks: Sequence[str]) -> TensorPlan:
    layers: dict[str, LayerCut] = {}
    counts: dict[str, tuple[str, ...]] = {}
    rotary: dict[str, Rotary] = {}
    units: dict[str, int] = {}
    for block in blocks:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            if _is_attention(module):
                _refuse_unknown(model, name, module)
                fused = _joined_outside(model, name, module)
                layers |= _attention_layers(name, module) | fused
                counts[name] = COUNTS_OF_HEADS + MORE_COUNTS.get(_processor(module), ())
                if fused:
                    counts[name.rpartition(".")[0]] = HIDDEN_WIDTHS
                if arguments := ROTARY.get(type(module).__name__):
                    rotary[name] = arguments
                units |= {f"{name}: {what}": size for what, size in _head_counts(module).items()}
                units |= {key: size for key, cut in fused.items() for size in cut.parts}
            else:
                own = _feed_forward_layers(name, module)
                layers |= own
                units |= {key: size for key, cut in own.items() for size in cut.parts}
    return TensorPlan(layers if counts else {}, counts, rotary, units)


def _is_attention(module: nn.Module) -> bool:
    return type(module).__name__ in REFUSED or _first(module, QUERIES) is not None


def _first(module: nn.Module, names: Sequence[str]) -> Any:
    """The first layer that a module has of these, or of what a list of that name starts with."""
    found = (getattr(module, name, None) for name in names)
    return next((layer for layer in found if isinstance(layer, nn.Module)), None)


def _processor(module: nn.Module) -> str:
    return type(getattr(module, "processor", module)).__name__


def _refuse_known(name: str, kind: str, module: nn.Module, model: nn.Module) -> None:
    if (refuse := REFUSED.get(kind)) is not None and (reason := refuse(module)) is not None:
        place = f"{name} of {type(model).__name__} ({kind})" if name else f"of {type(model).__name__}"
        raise ConfigError(
            f"tensor_parallel_size: the attention {place} cannot be cut: {reason}. Use pipeline_parallel_size."
        )


def _refuse_unknown(model: nn.Module, name: str, module: nn.Module) -> None:
    processor = _processor(module)
    _refuse_known(name, processor, module, model)
    own = [key for key, _ in module.named_parameters(recurse=False)]
    if processor not in PROCESSORS or own:
        what = f"the parameter {own[0]!r}" if own else f"the processor {processor}"
        raise ConfigError(
            f"tensor_parallel_size: {name} of {type(model).__name__} has {what}, of which it is not known that it works on a "
            "part of the heads. Use pipeline_parallel_size, or give the class a `_tp_plan` as diffusers' own have it."
        )


def _attention_layers(name: str, module: nn.Module) -> dict[str, LayerCut]:
    inner = _inner_width(module)
    found: dict[str, LayerCut] = {}
    for key in COLUMN_LAYERS:
        if isinstance(layer := getattr(module, key, None), nn.Module):
            found[f"{name}.{key}"] = LayerCut("column", _stretches(layer, inner))
    for key in ROW_LAYERS:
        layer = getattr(module, key, None)
        if isinstance(layer, nn.ModuleList):
            key, layer = f"{key}.0", layer[0]
        if isinstance(layer, nn.Module):
            found[f"{name}.{key}"] = LayerCut("row", (_size(layer, "row"),))
    key_width = _size(_first(module, KEYS), "column") or inner
    heads = _head_counts(module)["heads"]
    for key in NORMS_OF_HEADS:
        norm = getattr(module, key, None)
        if norm is not None and heads > 1 and (width := _norm_width(norm)) in (inner, key_width):
            found[f"{name}.{key}"] = LayerCut("norm", (width,))
    return found


def _inner_width(module: nn.Module) -> int:
    """Of all heads together."""
    join = _first(module, ROW_LAYERS)
    join = join[0] if isinstance(join, nn.ModuleList) else join
    return _size(join, "row") or _size(_first(module, QUERIES), "column")


def _size(layer: nn.Module | None, style: Style) -> int:
    """Of the dimension that is cut; 0 for a layer of another kind, which is refused later."""
    return int(getattr(layer, "in_features" if style == "row" else "out_features", 0))


def _stretches(layer: nn.Module, width: int) -> tuple[int, ...]:
    """The outputs of a layer, taken apart where it makes several things of that width side by side."""
    size = _size(layer, "column")
    return (width,) * (size // width) if width and size > width and size % width == 0 else (size,)


def _norm_width(norm: nn.Module) -> int | None:
    """The number of channels a norm takes together; None where it says none."""
    shape = getattr(norm, "normalized_shape", None) or getattr(norm, "dim", None)
    return int(shape[-1]) if isinstance(shape, tuple) else None


def _head_counts(module: nn.Module) -> dict[str, int]:
    """Heads of queries and, where they are fewer, of keys and values."""
    heads = next(int(getattr(module, name)) for name in HEADS if isinstance(getattr(module, name, None), int))
    keys = _size(_first(module, KEYS), "column") * heads // max(_inner_width(module), 1)
    return {"heads": heads, "key heads": keys} if keys not in (0, heads) else {"heads": heads}


def _joined_outside(model: nn.Module, name: str, module: nn.Module) -> dict[str, LayerCut]:
    """The layers of a block that joins heads and hidden width in one projection, as FLUX's single blocks do.

    Raises:
        ConfigError: the attention has no output projection, and neither has its block one of that kind.
    """
    if _first(module, ROW_LAYERS) is not None:
        return {}
    parent_name = name.rpartition(".")[0]
    parent = model.get_submodule(parent_name)
    make, join = getattr(parent, "proj_mlp", None), getattr(parent, "proj_out", None)
    if isinstance(make, nn.Linear) and isinstance(join, nn.Linear):
        inner = _inner_width(module)
        hidden = join.in_features - inner
        if hidden > 0 and make.out_features % hidden == 0:
            return {
                f"{parent_name}.proj_mlp": LayerCut("column", _stretches(make, hidden)),
                f"{parent_name}.proj_out": LayerCut("row", (inner, hidden)),
            }
    raise ConfigError(
        f"tensor_parallel_size: {name} of {type(model).__name__} has no output projection, and its block joins the heads in a "
        "way that is not known. Use pipeline_parallel_size."
    )


def _feed_forward_layers(name: str, module: nn.Module) -> dict[str, LayerCut]:
    known = dict(module.named_modules())
    for columns, row in FEED_FORWARD.get(type(module).__name__, ()):
        if all(isinstance(known.get(key), nn.Linear) for key in (*columns, row)):
            hidden = _size(known[row], "row")
            found = {f"{name}.{key}": LayerCut("column", _stretches(known[key], hidden)) for key in columns}
            return found | {f"{name}.{row}": LayerCut("row", (hidden,))}
    return {}
