"""Names and numbers as people read them."""

from collections.abc import Iterable

from torch import fx


def block_ranges(names: Iterable[str]) -> tuple[str, ...]:
    """Names of blocks, runs of neighbours in one list written as one: `blocks.0`, `blocks.1` -> `blocks 0-1`."""
    runs: list[tuple[str, int, int]] = []
    single: list[str] = []
    for name in names:
        parent, _, index = name.rpartition(".")
        if not index.isdigit():
            single.append(name)
        elif runs and (runs[-1][0], runs[-1][2]) == (parent, int(index) - 1):
            runs[-1] = (parent, runs[-1][1], int(index))
        else:
            runs.append((parent, int(index), int(index)))
    written = [f"{parent} {first}" if first == last else f"{parent} {first}-{last}" for parent, first, last in runs]
    return (*written, *dict.fromkeys(single))


def origin(node: fx.Node) -> str:
    """What made a value, in the model's words.

    A module's output carries the module's name, with an index if it is one of several. Other values carry the operation
    and the modules it works on.
    """
    if node.op == "placeholder":
        return f"input {node.meta['input']}"
    if node.op in ("call_module", "get_attr"):
        return str(node.target)
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    operation = getattr(node.target, "__name__", str(node.target))
    if operation == "getitem" and source is not None and source.op == "call_module":
        return f"{source.target}[{node.args[1]}]"
    modules = _nearest_modules(node)
    if not modules:
        return operation
    listed = ", ".join(modules[:2]) + (", ..." if len(modules) > 2 else "")
    return f"{operation} of {listed}"


def count(number: float) -> str:
    """A count with three digits and a unit: 14288491584 -> `14.3 B`."""
    return _scaled(number, 1000, ("", "K", "M", "B", "T", "P", "E"))


def data_size(size: float) -> str:
    """A size with three digits in binary units, as memory of GPUs is measured: `26.6 GiB`."""
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def duration(seconds: float) -> str:
    """A time with three digits and a unit: `41.3 ms`."""
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * length:
            return f"{_three_digits(seconds / length)} {unit}"
    return f"{_three_digits(seconds * 1e6)} µs"


def _scaled(number: float, step: int, units: tuple[str, ...]) -> str:
    unit = 0
    while number >= 999.5 and unit < len(units) - 1:
        number /= step
        unit += 1
    return f"{_three_digits(number) if unit else f'{number:.0f}'} {units[unit]}".rstrip()


def _three_digits(number: float) -> str:
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"


def _nearest_modules(node: fx.Node) -> list[str]:
    found: dict[str, None] = {}
    pending = list(node.all_input_nodes)
    met = set(pending)
    while pending:
        source = pending.pop(0)
        if source.op == "call_module":
            found[str(source.target)] = None
            continue
        fresh = [other for other in source.all_input_nodes if other not in met]
        met.update(fresh)
        pending += fresh
    return list(found)
