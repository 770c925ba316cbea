"""What blocks cost and what ranks can do: plain numbers, the input of every partitioner."""

import math
from dataclasses import dataclass

from partitioners.errors import InvalidCostError


def _check_number(field: str, value: object, *, above_zero: bool = False) -> None:
    valid = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not valid or (above_zero and value == 0):
        raise InvalidCostError(field, value, f"a finite number {'above 0' if above_zero else 'of 0 or more'}")


def _check_integer(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidCostError(field, value, "an integer of 0 or more")


@dataclass(frozen=True)
class BlockCost:
    """What one call of one block costs, or the glue before or after all blocks.

    Args:
        seconds: Compute time on a rank of speed 1.
        parameter_bytes: Bytes of its weights.
        activation_bytes: Peak bytes of activations while it runs.
        boundary_bytes: Bytes that cross from one stage to the next if the model is cut right after it.
        flops: Floating-point operations. No partitioner reads them; they are here for reports.

    Raises:
        InvalidCostError: If a number is negative, not finite, or (bytes and FLOPs) not an integer.
    """

    seconds: float
    parameter_bytes: int = 0
    activation_bytes: int = 0
    boundary_bytes: int = 0
    flops: int = 0

    def __post_init__(self) -> None:
        _check_number("BlockCost.seconds", self.seconds)
        for name in ("parameter_bytes", "activation_bytes", "boundary_bytes", "flops"):
            _check_integer(f"BlockCost.{name}", getattr(self, name))


NOTHING = BlockCost(seconds=0.0)


@dataclass(frozen=True)
class Component:
    """Something besides the transformer that one rank holds and runs: a text encoder, a VAE.

    Args:
        name: Such as `vae`.
        seconds: Time per transformer call that it takes on a rank of speed 1: of the whole run, its share of one step.
        bytes: That it takes in memory.
        rank: The rank that holds it; None: the one where it is best. Negative numbers count from the last rank.
        preferred_rank: Where it goes if that is as good as anywhere.
        alone: Its rank gets no blocks.

    Raises:
        InvalidCostError: If a number is negative or not finite, or bytes or a rank are not an integer.
    """

    name: str
    seconds: float = 0.0
    bytes: int = 0
    rank: int | None = None
    preferred_rank: int = 0
    alone: bool = False

    def __post_init__(self) -> None:
        _check_number("Component.seconds", self.seconds)
        _check_integer("Component.bytes", self.bytes)
        for field in ("rank", "preferred_rank"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise InvalidCostError(f"Component.{field}", value, "the number of a rank")


@dataclass(frozen=True)
class ModelCosts:
    """What a model costs.

    Args:
        blocks: One entry per block call, in execution order.
        prologue: The glue before the blocks; it runs on the first stage. Its `boundary_bytes` are what crosses where
            the first stage has no blocks.
        epilogue: The glue after the blocks; it runs on the last stage. Nothing crosses after it.
        replicated_bytes: Bytes of weights that every stage holds.
        components: What is held and run besides; only `vae_aware` places them.

    Raises:
        InvalidCostError: If there are no blocks, or two components have one name, or `replicated_bytes` is not an integer
            of 0 or more.
    """

    blocks: tuple[BlockCost, ...]
    prologue: BlockCost = NOTHING
    epilogue: BlockCost = NOTHING
    replicated_bytes: int = 0
    components: tuple[Component, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        object.__setattr__(self, "components", tuple(self.components))
        names = [component.name for component in self.components]
        if len(set(names)) < len(names):
            raise InvalidCostError("ModelCosts.components", names, "each component a name of its own")
        if not self.blocks:
            raise InvalidCostError("ModelCosts.blocks", self.blocks, "one BlockCost per block, at least one")
        _check_integer("ModelCosts.replicated_bytes", self.replicated_bytes)

    @classmethod
    def uniform(
        cls,
        num_blocks: int,
        *,
        seconds: float = 1.0,
        parameter_bytes: int = 0,
        activation_bytes: int = 0,
        boundary_bytes: int = 0,
        flops: int = 0,
    ) -> "ModelCosts":
        """A model of `num_blocks` equal blocks without glue; every other argument is per block."""
        _check_integer("num_blocks", num_blocks)
        return cls((BlockCost(seconds, parameter_bytes, activation_bytes, boundary_bytes, flops),) * num_blocks)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def boundary_bytes(self, end: int) -> int:
        """Bytes that cross if the model is cut with `end` blocks before the cut; 0 cuts between prologue and blocks."""
        return (self.blocks[end - 1] if end else self.prologue).boundary_bytes

    def glue(self, stage: int, num_stages: int) -> tuple[BlockCost, ...]:
        """The glue that stage `stage` runs besides its blocks; a single stage runs both prologue and epilogue."""
        before = (self.prologue,) if stage == 0 else ()
        after = (self.epilogue,) if stage == num_stages - 1 else ()
        return before + after


@dataclass(frozen=True)
class RankSpec:
    """What one rank can do, and what it does besides its stage.

    Args:
        speed: How many times faster than the device that `BlockCost.seconds` were taken on.
        memory_bytes: How many bytes its stage may use; None for no limit.
        fixed_seconds: Time per transformer call that it spends on other work (a share of a VAE decode). Not scaled by
            `speed`.
        fixed_bytes: Bytes that other work holds on it (VAE, text encoder).
        link_bytes_per_second: Bandwidth of its link to the next rank; None if bytes cost no time.
        link_latency_seconds: Time that a transfer to the next rank takes besides its bytes.
        holds_blocks: Whether it may get blocks; a rank for a VAE alone does not.

    Raises:
        InvalidCostError: If a number is negative or not finite, a speed or bandwidth is 0, or bytes are not an integer.
    """

    speed: float = 1.0
    memory_bytes: int | None = None
    fixed_seconds: float = 0.0
    fixed_bytes: int = 0
    link_bytes_per_second: float | None = None
    link_latency_seconds: float = 0.0
    holds_blocks: bool = True

    def __post_init__(self) -> None:
        _check_number("RankSpec.speed", self.speed, above_zero=True)
        if self.memory_bytes is not None:
            _check_integer("RankSpec.memory_bytes", self.memory_bytes)
        _check_number("RankSpec.fixed_seconds", self.fixed_seconds)
        _check_integer("RankSpec.fixed_bytes", self.fixed_bytes)
        if self.link_bytes_per_second is not None:
            _check_number("RankSpec.link_bytes_per_second", self.link_bytes_per_second, above_zero=True)
        _check_number("RankSpec.link_latency_seconds", self.link_latency_seconds)

    def transfer_seconds(self, num_bytes: int) -> float:
        """Seconds to send `num_bytes` to the next rank."""
        bandwidth = self.link_bytes_per_second
        return self.link_latency_seconds + (0.0 if bandwidth is None else num_bytes / bandwidth)
