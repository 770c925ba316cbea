"""Quantised FLUX, loaded whole and stage by stage: the same bits, and what each rank holds of it.

    python recipes/benchmarks/quantised.py [--device cuda] [--methods torchao-int8 ...] [--stages 2] [--heads 24] [--side 512]
        [--json FILE]

A pipeline with random weights, as wide as FLUX.1 but with few blocks, is saved plain, quantised, and as a GGUF file. diffusers
loads it whole, in one process; then ranks load their stages of it. All make latents of the same prompt, at two sizes. With one
GPU the ranks share it. What should happen: equal bits; each rank holds about its share of the whole's bytes. bitsandbytes
wants a GPU, at least as diffusers asks for it.
"""

import argparse
import gc
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import diffusers
import gguf
import torch
from diffusers import (
    AutoencoderKL,
    BitsAndBytesConfig,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    GGUFQuantizationConfig,
    PipelineQuantizationConfig,
    TorchAoConfig,
)
from reporting import show, write
from torch import nn

from dit_pipelining import launch
from dit_pipelining.api import ParallelConfig, load_pipeline, parallelize

METHODS = ("torchao-int8", "bitsandbytes-int8", "bitsandbytes-nf4", "gguf-q8_0")
WAYS = ("quantised while loading", "stored quantised", "split in memory")
COLUMNS = ("whole, MiB", "each rank, MiB", "seconds, whole", "seconds, ranks")
DTYPE = torch.bfloat16
ABSENT = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
HEAD = 128
"""Channels of a head."""


def configuration(method: str) -> Any:
    """What diffusers takes to quantise a transformer."""
    if method == "torchao-int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    if method == "bitsandbytes-int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    if method == "bitsandbytes-nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=DTYPE)
    return GGUFQuantizationConfig(compute_dtype=DTYPE)


def of_pipeline(method: str) -> PipelineQuantizationConfig:
    return PipelineQuantizationConfig(quant_mapping={"transformer": configuration(method)})


def save_plain(folder: Path, heads: int, device: str) -> None:
    """A FLUX pipeline without text encoders, and with the smallest VAE."""
    torch.manual_seed(0)
    with torch.device(device):
        transformer = FluxTransformer2DModel(
            num_layers=2,
            num_single_layers=4,
            attention_head_dim=HEAD,
            num_attention_heads=heads,
            joint_attention_dim=512,
            pooled_projection_dim=256,
            guidance_embeds=True,
        ).to(DTYPE)
    kinds = [f"{way}Block2D" for way in ("DownEncoder", "UpDecoder") for _ in range(4)]  # pixels / 8, as FLUX has them
    vae = AutoencoderKL(
        down_block_types=kinds[:4],
        up_block_types=kinds[4:],
        block_out_channels=[8] * 4,
        latent_channels=16,
        norm_num_groups=1,
    )
    scheduler = FlowMatchEulerDiscreteScheduler()
    FluxPipeline(scheduler=scheduler, vae=vae, transformer=transformer, **ABSENT).save_pretrained(folder)


def save_gguf(folder: Path, path: Path) -> None:
    """The transformer's matrices as Q8_0, all else as it is."""
    model = FluxTransformer2DModel.from_pretrained(folder / "transformer", dtype=torch.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(path, "flux")
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def paint(pipeline: Any, side: int) -> torch.Tensor:
    """Latents of one request, on the CPU."""
    pipeline.set_progress_bar_config(disable=True)
    draw = torch.Generator().manual_seed(1)
    device = pipeline.transformer.device
    embeds = torch.randn(1, 64, 512, generator=draw).to(device, DTYPE)
    pooled = torch.randn(1, 256, generator=draw).to(device, DTYPE)
    images = pipeline(
        prompt_embeds=embeds,
        pooled_prompt_embeds=pooled,
        height=side,
        width=side,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(7),
        output_type="latent",
    ).images
    return images.cpu()


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The plain tensors that a weight is made of."""
    if isinstance(value, torch.Tensor):
        inner = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else ()
        for name in inner:
            yield from tensors_of(getattr(value, name))
        if not inner and value.device.type != "meta":
            yield value
        beside = (getattr(value, name, None) for name in ("quant_state", "SCB"))
        for part in beside:
            yield from tensors_of(part)
    elif hasattr(value, "absmax"):  # bitsandbytes' state of a 4-bit weight
        for part in (value.absmax, value.code, value.offset, value.state2):
            yield from tensors_of(part)


def held_bytes(model: nn.Module) -> int:
    """Of the weights of a model, scales and tables of quantised ones included."""
    weights = [*nn.Module.parameters(model), *model.buffers()]
    weights += [module.state.SCB for module in model.modules() if hasattr(module, "init_8bit_state")]
    found = {part.data_ptr(): part.nbytes for weight in weights for part in tensors_of(weight)}
    return sum(found.values())


def load(method: str, way: str, folder: Path, config: ParallelConfig | None, device: str) -> Any:
    """A pipeline, whole without a configuration."""
    options: dict[str, Any] = dict(dtype=DTYPE, **ABSENT)
    own = folder / (method if way == "stored quantised" and method != "gguf-q8_0" else "plain")
    file = str(folder / "q8_0.gguf")
    if method == "gguf-q8_0" and (config is None or way == "split in memory"):
        options["transformer"] = FluxTransformer2DModel.from_single_file(
            file, config=str(folder / "plain/transformer"), dtype=DTYPE, quantization_config=configuration(method)
        )
    elif method == "gguf-q8_0":
        options["transformer"] = file
    elif way != "stored quantised":
        options["quantization_config"] = of_pipeline(method)
    if config is not None and way != "split in memory":
        return load_pipeline(own, config, **options)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(own, **options)
    return pipeline.to(device) if config is None else parallelize(pipeline, config)


def store(methods: Sequence[str], folder: Path) -> None:
    """Save the plain pipeline's transformer once more in the form of each method."""
    for method in methods:
        if method == "gguf-q8_0":
            save_gguf(folder / "plain", folder / "q8_0.gguf")
        else:
            diffusers.DiffusionPipeline.from_pretrained(
                folder / "plain", dtype=DTYPE, quantization_config=of_pipeline(method), **ABSENT
            ).save_pretrained(folder / method)


def ways_of(method: str) -> Sequence[str]:
    """How its quantised stages can come about; a GGUF file is quantised already."""
    return WAYS[1:] if method == "gguf-q8_0" else WAYS


def session(methods: Sequence[str], folder: Path, stages: int | None, device: str, side: int) -> list[dict[str, Any]]:
    """What one rank, or the one process, sees of each method and way, one after the other."""
    torch.set_grad_enabled(False)
    config = None if stages is None else ParallelConfig(pipeline_parallel_size=stages, timeout_seconds=60)
    return [seen(method, way, folder, config, device, side) for method in methods for way in ways_of(method)]


def seen(method: str, way: str, folder: Path, config: ParallelConfig | None, device: str, side: int) -> dict[str, Any]:
    """Latents, bytes and seconds of one method and way, or the error that it ended with."""
    on_gpu = device.startswith("cuda")
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    try:
        pipeline = load(method, way, folder, config, device)
        images = [paint(pipeline, side) for side in (side, 2 * side)]
    except Exception as error:
        traceback.print_exc()
        return dict(error=f"{type(error).__name__}: {error}")
    return dict(
        images=images,
        bytes=held_bytes(pipeline.transformer),
        seconds=round(time.perf_counter() - started, 2),
        peak=torch.cuda.max_memory_allocated() if on_gpu else None,
    )


def compared(method: str, way: str, whole: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row: whether all ranks made the latents of the whole, and what each holds."""
    errors = [own["error"] for own in (whole, *ranks) if "error" in own]
    if errors:
        return dict(method=method, way=way, errors=errors)
    return dict(
        method=method,
        way=way,
        equal=all(all(map(torch.equal, whole["images"], rank["images"])) for rank in ranks),
        finite=bool(torch.isfinite(whole["images"][0]).all()),
        **{f"whole_{name}": whole[name] for name in ("bytes", "peak", "seconds")},
        **{f"stage_{name}": [rank[name] for rank in ranks] for name in ("bytes", "peak", "seconds")},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--heads", type=int, default=24, help="of attention; FLUX.1 has 24")
    parser.add_argument("--side", type=int, default=512, help="of the smaller picture, in pixels")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    cases = [(method, way) for method in arguments.methods for way in ways_of(method)]
    with tempfile.TemporaryDirectory() as made:
        save_plain(Path(made) / "plain", arguments.heads, arguments.device)
        store(arguments.methods, Path(made))
        own = (arguments.device, arguments.side)
        [whole] = launch(session, arguments.methods, Path(made), None, *own, nproc=1)
        ranks = launch(session, arguments.methods, Path(made), arguments.stages, *own, nproc=arguments.stages)
    rows = [compared(*case, one, several) for case, one, *several in zip(cases, whole, *ranks, strict=True)]
    print(*rows, sep="\n", flush=True)
    write(arguments.json, {"device": arguments.device, "heads": arguments.heads, "rows": rows})
    show(f"FLUX of 2 + 4 blocks, {arguments.heads} heads, on {arguments.device}", [shown(row) for row in rows])
    if not all(row.get("equal") and row["finite"] for row in rows):
        raise SystemExit("a stage gave other bits than the whole, or failed")


def shown(row: dict[str, Any]) -> dict[str, str]:
    """A row for people."""
    mib = 2.0**20
    if "errors" in row:
        return {"method": row["method"], "stages": row["way"], "same bits": "failed"} | dict.fromkeys(COLUMNS, "")
    figures = (
        f"{row['whole_bytes'] / mib:.0f}",
        ", ".join(f"{size / mib:.0f}" for size in row["stage_bytes"]),
        f"{row['whole_seconds']:.1f}",
        f"{max(row['stage_seconds']):.1f}",
    )
    same = "yes" if row["equal"] and row["finite"] else "NO"
    return {"method": row["method"], "stages": row["way"], "same bits": same} | dict(zip(COLUMNS, figures, strict=True))


if __name__ == "__main__":
    main()
