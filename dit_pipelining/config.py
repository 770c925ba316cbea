"""ParallelConfig: how to spread a pipeline over ranks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from dit_pipelining.config_checks import (
    check_contradictions,
    check_partitioner,
    check_positive,
    command_for,
    early_counts_check,
    hsdp_sizes,
)
from dit_pipelining.config_names import sources_named
from dit_pipelining.config_types import check_types
from dit_pipelining.errors import ConfigError, WorldSizeError
from partitioners import Partitioner, RankSpec, TooManyStagesError
from partitioners.errors import counted

DIMENSIONS = {
    "data": "data_parallel_size",
    "cfg": "cfg_parallel_size",
    "pipeline": "pipeline_parallel_size",
    "ring": "ring_degree",
    "ulysses": "ulysses_degree",
    "tensor": "tensor_parallel_size",
}
"""Dimensions along which the ranks are laid out, the one that talks most last, and the option that says its size."""

Schedule = Literal["rolling", "gpipe"]
UlyssesMode = Literal["strict", "anything"]
Topology = Literal["auto", "nvlink", "pcie", "ethernet"]

SCHEDULES: tuple[str, ...] = get_args(Schedule)
ULYSSES_MODES: tuple[str, ...] = get_args(UlyssesMode)
TOPOLOGIES: tuple[str, ...] = get_args(Topology)
"""Which link joins a device to the next one; auto: NVLink where every machine has it, else PCIe."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How to spread a pipeline over ranks.

    Args:
        pipeline_parallel_size: number of pipeline stages that each transformer is cut into.
        partitioner: where to cut: `"balanced"` (by time), `"vae-aware"` (with the time of the VAE and the text encoders),
            `"uniform"`, or a function.
        profile: what times are taken from: a file of `dit-pipelining profile`, or a device such as `"h200"`, for which they
            are predicted. Default: FLOPs, or the first device of `ranks`.
        ranks: what the ranks are, where they differ or where memory is short: for each stage a device or its memory, such as
            `"rtx4090,rtx3090"`, `"rtx4090:16GB,rtx4090"` or `"24GB*2,16GB"` (twice as fast as the second); one stands for
            all. Default: equal ranks, any memory.
        topology: the links between such devices: `"auto"`, `"nvlink"`, `"pcie"` or `"ethernet"`.
        partition: blocks per stage, for example `"8,12,12,8"`, for every transformer; or by component, for example
            `{"transformer": "8,12,12,8", "transformer_2": "10,10,10,10"}`. Beats VLLM_PP_LAYER_PARTITION, which decides
            for all transformers that have no counts here, and which beats `partitioner`.
        blocks: names of the transformer's blocks or block lists, where they are not found by themselves.
        microbatches: into how many parts a batch is cut along the pipeline, so that stages work at the same time. 1
            keeps the batch whole and every bit of the result; kernels can round a smaller batch differently.
        cfg_parallel_size: number of replicas of the pipeline, over which the calls of a step (the branches of guidance)
            and the requests of `generate` are spread. A batch with both branches in it is cut over them.
        data_parallel_size: number of copies of all this, over which the requests of `generate` are spread.
        tensor_parallel_size: ranks over which heads and feed-forward widths of each block are split.
        ulysses_degree, ring_degree: ranks over which the tokens of each call are split: by exchanging heads for tokens
            around attention (Ulysses), by passing keys and values around (ring), or both.
        ulysses_mode: `"strict"`: tokens of images, videos and texts are multiples of ring_degree x ulysses_degree;
            `"anything"`: any number, at the price of a message between the ranks' hosts at each attention.
        vae_patch_parallel_size: ranks that compute the tiles of a VAE together, bit for bit as its own tiling does on one,
            which it switches on. They are the rank that owns the VAE and others that run the same call; all hold its weights.
        text_encoder_tp_size: ranks over which the heads, widths and vocabulary of each text encoder are split: those that own
            it, and those after them that run the same calls. Or by component name, for example `{"text_encoder_2": 4}`;
            encoders that are not named stay whole.
        use_hsdp: keep the weights of each stage's blocks sharded over the ranks that hold that stage (cfg_parallel_size x
            ring_degree x ulysses_degree), and gather a block's when it runs.
        hsdp_shard_size: over how many of these ranks. Default: all. Where there is one (those sizes are 1), it makes
            hsdp_shard_size x hsdp_replicate_size replicas, as cfg_parallel_size does.
        hsdp_replicate_size: how many times each shard is there; hsdp_shard_size x hsdp_replicate_size ranks hold a stage.
        schedule: `"rolling"`: a call returns at once with a result that is waited for when it is used, so that both
            branches of a step, and several requests, are in flight. `"gpipe"`: torch's ScheduleGPipe over the microbatches
            of each call, which runs it to its end.
        compile: None; `"blocks"`: each kind of block is compiled once by torch.compile, which changes the last bits;
            `"blocks-cudagraphs"`: a stage's work is replayed as a CUDA graph too, for sizes where launching kernels takes
            longer than running them.
        transport: how data moves between the ranks. `"auto"`: `"peer"` where each rank has a GPU of its own on one host
            (copy engines, ordered by the GPUs themselves), else `"host"` (gloo, through host memory): on CPUs, for ranks
            that share a GPU, and across hosts. `"nccl"`, where each rank has a GPU, has been measured on one host only.
        vae_placement: `"inline"`: the rank that holds the VAE also runs blocks; `"shared"`: it is a rank of its own, without
            blocks.
        rebalance: measure how long the stages take, and between two calls of the pipeline move blocks to other ranks where
            that makes the slowest stage faster. Results stay the same bit for bit.
        timeout_seconds: how long a rank waits for another before the run ends with an error.
        component_ranks: the rank that holds a text encoder, image encoder or VAE, by component name, for example
            `{"vae": 0}`; `"all"`: every rank holds it and runs it. Ranks are counted within the pipeline_parallel_size x
            cfg_parallel_size that run a call together. Default: encoders on the first rank, spread out where they are large,
            VAEs on the last rank that returns results.
        output_ranks: ranks that return what the pipeline makes; the others return the same class of output with None in
            place of the data, and never hold decoded pixels. For example `[0]`.
        told: of fields that a file or the environment gave, their value and what an error calls them, such as `{"topology":
            ("pcie", "hardware.topology='pcie' (config.yaml)")}`. `load_config` fills it in.

    Raises:
        ConfigError: a value cannot be used; says which and why.
        CountsError: `partition` holds something else than one number of blocks per stage.
    """

    pipeline_parallel_size: int = 1
    partitioner: str | Partitioner = "balanced"
    profile: str | Path | None = None
    ranks: str | Sequence[str | RankSpec] | None = None
    topology: Topology = "auto"
    partition: str | Sequence[int] | Mapping[str, str | Sequence[int]] | None = None
    blocks: Sequence[str] | None = None
    microbatches: int = 1
    cfg_parallel_size: int = 1
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    ulysses_degree: int = 1
    ring_degree: int = 1
    ulysses_mode: UlyssesMode = "strict"
    vae_patch_parallel_size: int = 1
    text_encoder_tp_size: int | Mapping[str, int] = 1
    use_hsdp: bool = False
    hsdp_shard_size: int | None = None
    hsdp_replicate_size: int | None = None
    schedule: Schedule = "rolling"
    compile: Literal["blocks", "blocks-cudagraphs"] | None = None
    transport: Literal["auto", "peer", "nccl", "host"] = "auto"
    vae_placement: Literal["inline", "shared"] = "inline"
    rebalance: bool = False
    timeout_seconds: float = 600.0
    component_ranks: Mapping[str, int | Literal["all"]] | None = None
    output_ranks: Literal["all"] | Sequence[int] = "all"

    told: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        # What `dataclasses.replace` has exchanged is of no file.
        told = {name: own for name, own in self.told.items() if getattr(self, name) is own[0]}
        object.__setattr__(self, "told", told)
        with sources_named(told):
            self._check()

    def _check(self) -> None:
        check_types(self)
        for name in (*DIMENSIONS.values(), "microbatches", "vae_patch_parallel_size"):
            check_positive(name, getattr(self, name))
        self._check_hsdp()
        check_partitioner(self.partitioner)
        if self.vae_placement == "shared" and self.partitioner not in ("balanced", "vae-aware"):
            raise ConfigError(
                f"vae_placement='shared' does not go with partitioner={self.partitioner!r}: use 'balanced' or 'vae-aware', "
                "which can leave a rank without blocks."
            )
        if self.vae_placement == "shared" and self.pipeline_parallel_size < 2:
            raise ConfigError(
                "vae_placement='shared' takes a rank from the blocks; use pipeline_parallel_size=2 or more."
            )
        check_contradictions(self)
        seconds = self.timeout_seconds
        if not 0 < seconds < math.inf:
            raise ConfigError(f"timeout_seconds={seconds!r}: expected a number of seconds above 0.")
        if self.vae_patch_parallel_size > self.copy_size:
            raise ConfigError(
                f"vae_patch_parallel_size={self.vae_patch_parallel_size}: {counted(self.copy_size, 'rank')} at most "
                f"can run a call together; use {self.copy_size} or less."
            )
        self._check_text_encoders()
        self._check_ranks()
        for given in self.partition.values() if isinstance(self.partition, Mapping) else [self.partition]:
            if given is not None:
                early_counts_check(given, self.pipeline_parallel_size, f"partition={self.partition!r}")

    def _check_hsdp(self) -> None:
        if (sizes := hsdp_sizes(self)) is not None:
            for name, size in vars(sizes).items():
                object.__setattr__(self, name, size)

    def shown_on(self) -> tuple[int, ...]:
        """The ranks that return what the pipeline makes, in order."""
        return tuple(range(self.line_size)) if self.output_ranks == "all" else tuple(sorted(set(self.output_ranks)))

    @property
    def sequence_parallel_size(self) -> int:
        """The number of ranks that share the tokens of a call."""
        return self.ring_degree * self.ulysses_degree

    def _check_text_encoders(self) -> None:
        given = self.text_encoder_tp_size
        for size in given.values() if isinstance(given, Mapping) else [given]:
            if size < 1:
                raise ConfigError(f"text_encoder_tp_size={given!r}: expected integers of at least 1.")
            if size > self.copy_size:
                raise ConfigError(
                    f"text_encoder_tp_size={given!r}: {counted(self.copy_size, 'rank')} at most can run a call together; "
                    f"use {self.copy_size} or less."
                )

    def text_encoder_size(self, component: str) -> int:
        """The number of ranks over which one text encoder is split."""
        sizes = self.text_encoder_tp_size
        return sizes.get(component, 1) if isinstance(sizes, Mapping) else sizes

    def _check_ranks(self) -> None:
        for name, place in (self.component_ranks or {}).items():
            if place != "all":
                self._check_rank("component_ranks", place, f', or "all", for {name!r}')
        if not self.output_ranks:
            raise ConfigError(f"output_ranks={self.output_ranks!r}: expected 'all' or ranks, such as [0].")
        for rank in self.output_ranks if self.output_ranks != "all" else ():
            self._check_rank("output_ranks", rank, "")

    def _check_rank(self, name: str, rank: int, otherwise: str) -> None:
        if not 0 <= rank < self.line_size:
            raise ConfigError(
                f"{name}={getattr(self, name)!r}: {rank!r} is no rank; expected 0 to {self.line_size - 1}{otherwise}."
            )

    def check_world_size(self, world_size: int) -> None:
        """Compare the number of launched processes with the degrees.

        Raises:
            WorldSizeError: they do not match.
        """
        if world_size != self.world_size:
            always = ("pipeline_parallel_size", "cfg_parallel_size")
            sizes = {name: getattr(self, name) for name in DIMENSIONS.values()}
            spelt = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1 or name in always)
            copies, rest = divmod(world_size, self.world_size // self.data_parallel_size)
            hint = f", or use data_parallel_size={copies} for copies that share the requests" * (
                copies > 1 and not rest
            )
            raise WorldSizeError(
                f"this launch has {counted(world_size, 'rank')}, but {spelt} needs {self.world_size}. Start them "
                f"with `{command_for(self.world_size)}` or change the sizes{hint}."
            )

    @property
    def world_size(self) -> int:
        """The number of processes the degrees need."""
        return math.prod(getattr(self, name) for name in DIMENSIONS.values())

    @property
    def copy_size(self) -> int:
        """The number of ranks of each data-parallel copy, which make the same calls."""
        return self.world_size // self.data_parallel_size

    @property
    def line_size(self) -> int:
        """The number of ranks that run a call together, each a stage of a replica."""
        return self.pipeline_parallel_size * self.cfg_parallel_size

    def counts_for(self, component: str) -> str | Sequence[int] | None:
        """The blocks per stage that `partition` gives one transformer; None: the variable or the partitioner decides."""
        return self.partition.get(component) if isinstance(self.partition, Mapping) else self.partition

    def check_component_ranks(self, names: Iterable[str]) -> None:
        """Compare the components that `component_ranks` names with those of a pipeline that can lie on one rank.

        Raises:
            ConfigError: it names another one.
        """
        names = list(names)
        for name in self.component_ranks or {}:
            if name not in names:
                raise ConfigError(
                    f"component_ranks={self.component_ranks!r} names {name!r}; the components of this pipeline "
                    f"that can lie on one rank are {', '.join(map(repr, names)) or 'none'}."
                )

    def check_components(self, names: Iterable[str]) -> None:
        """Compare the components that `partition` names with those of a pipeline that are split.

        Raises:
            ConfigError: it names one that is not there.
        """
        names = list(names)
        unknown = [name for name in self.partition if name not in names] if isinstance(self.partition, Mapping) else []
        if unknown:
            raise ConfigError(
                f"partition={self.partition!r} names {', '.join(map(repr, unknown))}, which this pipeline "
                f"does not have; the transformers that are split are {', '.join(map(repr, names))}."
            )

    def check_counts(self, component: str, num_blocks: int) -> None:
        """Check what can be said about one transformer's partition before the shapes of its inputs are known.

        Whether counts sum to the number of blocks is known only after the capture, since it is calls that count.

        Args:
            component: its name in the pipeline.
            num_blocks: the number of its blocks.

        Raises:
            CountsError: counts here or in VLLM_PP_LAYER_PARTITION are not one number of blocks per stage.
            TooManyStagesError: there are no counts, and fewer blocks than stages.
        """
        stages = self.pipeline_parallel_size
        if not early_counts_check(self.counts_for(component), stages) and stages > num_blocks:
            raise TooManyStagesError(stages, num_blocks)
