"""Forward hooks on a split transformer: each rank's act on what it runs, and nobody is given tensors without data."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

from dit_pipelining.api import ParallelConfig, generate, load_pipeline
from dit_pipelining.errors import ConfigError, InputError
from tests import checkpoints
from tests.distributed import RankPool
from tests.layouts import LAYOUTS

WATCHED = {
    "transformer_blocks.0": [0],
    "single_transformer_blocks.2.attn": [1],
    "pos_embed": [0, 1],
    "context_embedder": [0],
    "time_text_embed": [0],
    "norm_out": [1],
}
"""Modules, and the stages that run them: rotary tables are computed where they are needed."""


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.flux(tmp_path_factory.mktemp("hooks") / "flux")


def request(seed: int = 7, **changes: Any) -> dict[str, Any]:
    size = dict(height=8, width=8, max_sequence_length=16, num_inference_steps=2, output_type="latent")
    return dict(prompt="a red cat", generator=torch.Generator().manual_seed(seed), **size) | changes


def loaded(folder: Path, layout: str | None, **options: Any) -> Any:
    if layout is None:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    else:
        pipeline = load_pipeline(folder, ParallelConfig(**LAYOUTS[layout], **options))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def hooked(folder: Path, layout: str | None) -> tuple[dict[str, torch.Tensor], dict[str, list[torch.Tensor]]]:
    """Images with hooks that change what modules give, put on before the split and after it, and what the hooks saw."""
    pipeline = loaded(folder, layout)
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in WATCHED}
    images = {}

    def hook_all() -> list[Any]:
        def watch(name: str) -> Any:
            def hook(module: Any, args: Any, output: Any) -> Any:
                many = isinstance(output, tuple)
                seen[name] += output if many else [output]
                return tuple(1.1 * tensor for tensor in output) if many else 1.1 * output

            return hook

        modules = {name: pipeline.transformer.get_submodule(name) for name in WATCHED}
        handles = [module.register_forward_hook(watch(name)) for name, module in modules.items()]
        root = pipeline.transformer
        handles.append(root.register_forward_hook(lambda _, args, output: (0.9 * output[0], *output[1:])))
        return handles

    for turn in ("before the split", "after it"):
        handles = hook_all()
        images[turn] = pipeline(**request()).images
        images[f"{turn}, larger"] = pipeline(**request(height=16)).images
        for handle in handles:
            handle.remove()
        images[f"{turn}, taken off"] = pipeline(**request()).images
    handles = hook_all()
    calls = [request(seed, height=height) for seed, height in ((1, 8), (2, 16))]
    outputs = generate(pipeline, calls) if layout else [pipeline(**call) for call in calls]
    images |= {f"request {index}": output.images for index, output in enumerate(outputs)}
    return images, {name: sorted(own, key=lambda t: (t.shape, t.sum().item())) for name, own in seen.items()}


def test_hooks_change_and_see_what_they_do_in_one_process(ranks: RankPool, flux: Path) -> None:
    [(expected, expected_seen)] = ranks.run(1, hooked, flux, None)
    assert not torch.equal(expected["after it"], expected["after it, taken off"])
    for stage, (images, seen) in enumerate(ranks.run(2, hooked, flux, "pp2")):
        assert [name for name, image in expected.items() if not torch.equal(images[name], image)] == []
        for name, stages in WATCHED.items():
            wanted = expected_seen[name] if stage in stages else []
            assert len(seen[name]) == len(wanted), name
            assert all(map(torch.equal, seen[name], wanted)), name


def message(pipeline: Any, error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        pipeline(**request())
    return str(caught.value)


def refused(folder: Path) -> dict[str, str]:
    """What is said when ranks would record different forwards, or blocks would be elsewhere than their weights."""
    pipeline = loaded(folder, "pp2", partition="3,2")
    model = pipeline.transformer
    before = pipeline(**request()).images
    found = {}
    handle = model.norm_out.register_forward_hook(print) if dist.get_rank() else None
    found["a hook on one rank"] = message(pipeline, InputError)
    if handle is not None:
        handle.remove()
    handle = register_module_forward_pre_hook(print)
    found["a hook on all modules"] = message(pipeline, ConfigError)
    handle.remove()
    first, second, third = model.single_transformer_blocks
    model.single_transformer_blocks[0], model.single_transformer_blocks[1] = second, first
    found["a block on another rank"] = message(pipeline, ConfigError)
    model.single_transformer_blocks[0], model.single_transformer_blocks[1] = first, second
    block_hook = third.register_forward_hook(lambda *_: None) if dist.get_rank() else None  # a block's own affair
    assert torch.equal(pipeline(**request()).images, before)
    if block_hook is not None:
        block_hook.remove()
    compiled = loaded(folder, "pp2", compile="blocks")
    compiled.transformer.transformer_blocks[0].attn.register_forward_hook(print)
    found["compiled blocks"] = message(compiled, ConfigError)
    return found


def test_what_ranks_cannot_follow_is_refused_on_all_of_them(ranks: RankPool, flux: Path) -> None:
    for found in ranks.run(2, refused, flux):
        assert "'transformer' (rank 0: not given, rank 1: ['a hook on norm_out'])" in found["a hook on one rank"]
        assert "<built-in function print> is a forward hook on all modules" in found["a hook on all modules"]
        assert "'single_transformer_blocks.0', which another rank runs" in found["a block on another rank"]
        assert "'transformer_blocks.0.attn' of the transformer" in found["compiled blocks"]
