"""The table that `dit-pipelining profile` prints: what was measured, and how fast that is."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dit_pipelining.costs.measured import Measured, MeasuredProfile
from dit_pipelining.lowering.names import count, duration


def print_profile(profile: MeasuredProfile) -> None:
    """Print a profile's parts."""
    console = Console(highlight=False)
    size = ", ".join(f"{name} {value}" for name, value in profile.size.items())
    console.print(
        Text(profile.model, style="bold").append(f"  {size}  {profile.dtype} on {profile.device}", style="default")
    )
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("part")
    for name in ("seconds", "FLOPs", "FLOPs a second"):
        table.add_column(name, justify="right")
    for kind, part in profile.blocks.items():
        _add(table, f"block {kind}", part)
    _add(table, "prologue", profile.prologue)
    _add(table, "epilogue", profile.epilogue)
    for name, seconds in (("VAE encode", profile.vae_encode_seconds), ("VAE decode", profile.vae_decode_seconds)):
        if seconds is not None:
            _add(table, name, Measured(seconds))
    console.print(table)


def _add(table: Table, name: str, part: Measured) -> None:
    rate = count(part.flops / part.seconds) if part.flops and part.seconds else ""
    table.add_row(name, duration(part.seconds), count(part.flops) if part.flops else "", rate)
