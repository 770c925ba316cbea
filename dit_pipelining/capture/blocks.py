"""Which submodules of a model are its blocks."""

from collections.abc import Iterable, Sequence

from torch import nn

from dit_pipelining.errors import BlocksNotFoundError, NotATransformerError

MINOR_LIST_SHARE = 0.05
"""Without class hints, a ModuleList counts as a block list from this share of the largest list's parameters on."""


def find_blocks(model: nn.Module, blocks: Sequence[str] | None = None) -> list[str]:
    """Names of the model's blocks, in the order of its module tree.

    Args:
        model: the unsplit transformer.
        blocks: names chosen by the caller, of blocks (`"layers.3"`) or of whole lists (`"layers"`). Default: the members
            of ModuleLists whose class is named by the model class's `_no_split_modules` or `_repeated_blocks`
            (diffusers' own marks of what must stay together and of what repeats); without such marks the members of
            the outermost ModuleLists that hold most parameters.

    Raises:
        NotATransformerError: `model` is no `nn.Module`.
        BlocksNotFoundError: a chosen name does not exist, or the model has no list of blocks.
    """
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise NotATransformerError(
            f"expected a torch.nn.Module to split, got {got}. Pass a diffusers transformer, for example "
            "`pipe.transformer`; to split a whole pipeline use `load_pipeline`."
        )
    if blocks is not None:
        return _chosen(model, blocks)
    lists = _outermost_lists(model)
    marked = {*(getattr(model, "_no_split_modules", None) or ()), *(getattr(model, "_repeated_blocks", None) or ())}
    names = [n for members in lists.values() for n, module in members if _is_or_wraps(module, marked)]
    return names or _largest(model, lists)


def _is_or_wraps(module: nn.Module, classes: set[str]) -> bool:
    """Whether the module's class is marked, or a marked one lies in it (HiDream wraps its blocks).

    Derived classes count: FSDP2 gives modules that it shards one of its own.
    """
    return any(base.__name__ in classes for part in module.modules() for base in type(part).__mro__)


def _chosen(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    known = dict(model.named_modules())
    names: list[str] = []
    blocks = [blocks] if isinstance(blocks, str) else list(blocks)
    for name in blocks:
        if not name or name not in known:
            available = ", ".join(_outermost_lists(model)) or "none"
            raise BlocksNotFoundError(
                f"blocks={blocks!r}: {type(model).__name__} has no submodule {name!r}. Its block lists: {available}."
            )
        module = known[name]
        names += [f"{name}.{key}" for key, _ in module.named_children()] if _is_list(module) else [name]
    for name in names:
        if any(name.startswith(f"{other}.") for other in names):
            raise BlocksNotFoundError(
                f"blocks={blocks!r}: {name!r} lies inside another chosen block. Keep one of them."
            )
    if not names:
        raise BlocksNotFoundError(f"blocks={blocks!r} names no blocks. Leave it out to have them found.")
    return list(dict.fromkeys(names))


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)


def _outermost_lists(model: nn.Module) -> dict[str, list[tuple[str, nn.Module]]]:
    """ModuleLists that do not lie inside a member of another ModuleList, with their named members."""
    found: dict[str, list[tuple[str, nn.Module]]] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            if isinstance(child, nn.ModuleList):
                found[name] = [(f"{name}.{i}", member) for i, member in child.named_children()]
            else:
                visit(child, f"{name}.")

    visit(model, "")
    return found


def _largest(model: nn.Module, lists: dict[str, list[tuple[str, nn.Module]]]) -> list[str]:
    sizes = {name: _parameter_count(module for _, module in members) for name, members in lists.items()}
    largest = max(sizes.values(), default=0)
    if not largest:
        raise BlocksNotFoundError(
            f"{type(model).__name__} has no nn.ModuleList with parameters, so there is nothing to cut between. "
            "Name its blocks with blocks=[...]."
        )
    return [n for name, members in lists.items() if sizes[name] >= MINOR_LIST_SHARE * largest for n, _ in members]


def _parameter_count(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
