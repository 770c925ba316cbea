"""What seconds are taken from: a device's data sheet or a measured profile, as the user names it."""

from pathlib import Path

from dit_pipelining.costs.devices import DEVICES, DeviceProfile, find_device
from dit_pipelining.costs.measured import MeasuredProfile, read_profile
from dit_pipelining.costs.model_costs import Timing
from dit_pipelining.costs.roofline import Roofline
from dit_pipelining.errors import ConfigError

TimingChoice = str | Path | DeviceProfile | MeasuredProfile


def find_timing(choice: TimingChoice | None) -> Timing | None:
    """How long a model's parts take.

    Args:
        choice: the path of a profile that `dit-pipelining profile` wrote, the name of a device (`"h200"`), or either of
            them in memory. None: nothing is known; a nominal rate will do.

    Raises:
        ConfigError: it is neither, or the profile cannot be read.
    """
    if choice is None or isinstance(choice, MeasuredProfile):
        return choice
    if isinstance(choice, DeviceProfile):
        return Roofline(choice)
    if not isinstance(choice, str | Path):
        raise ConfigError(f"profile={choice!r}: expected the path of a profile, or one of {', '.join(DEVICES)}.")
    path = Path(choice)
    if path.suffix == ".json" or path.is_file():
        return read_profile(path)
    try:
        return Roofline(find_device(str(choice)))
    except ConfigError:
        raise ConfigError(
            f"profile={str(choice)!r} is neither a profile (a .json file) nor a device; known devices are "
            f"{', '.join(DEVICES)}."
        ) from None
