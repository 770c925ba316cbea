"""The list of presets that `dit-pipelining show --list` prints."""

from rich.console import Console
from rich.table import Table

from dit_pipelining.planning.presets import preset, preset_names


def print_presets(console: Console) -> None:
    """Print all presets: class, parameters, blocks, and the pipeline's default size."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("preset", no_wrap=True)
    table.add_column("transformer")
    table.add_column("parameters", justify="right")
    table.add_column("blocks", justify="right")
    table.add_column("default size")
    for name in preset_names():
        known = preset(name)
        copies = f"{len(known.components)} x " if len(known.components) > 1 else ""
        size = known.defaults
        frames = f" x {size['frames']}" if size["frames"] > 1 else ""
        table.add_row(
            name,
            known.model_class,
            f"{copies}{known.parameters / 1e9:.2f} B",
            "+".join(str(number) for number in known.blocks.values()),
            f"{size['width']}x{size['height']}{frames}",
        )
    console.print(table)
