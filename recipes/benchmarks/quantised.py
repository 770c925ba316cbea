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
from collections.abc import Iterator
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
    own = folder / (method if way == "stored quantised" else "plain")
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


def session(method: str, way: str, folder: Path, stages: int | None, device: str, side: int) -> dict[str, Any]:
    """What one rank, or the one process, sees."""
    torch.set_grad_enabled(False)
    started = time.perf_counter()
    config = None if stages is None else ParallelConfig(pipeline_parallel_size=stages)
    pipeline = load(method, way, folder, config, device)
    images = [paint(pipeline, side) for side in (side, 2 * side)]
    found = dict(images=images, bytes=held_bytes(pipeline.transformer), seconds=time.perf_counter() - started)
    if device.startswith("cuda"):
        found["peak"] = torch.cuda.max_memory_allocated()
    return found


def measure(method: str, folder: Path, stages: int, device: str, side: int) -> list[dict[str, Any]]:
    """Figures of each way to get a pipeline of quantised stages."""
    if method == "gguf-q8_0":
        save_gguf(folder / "plain", folder / "q8_0.gguf")
    else:
        diffusers.DiffusionPipeline.from_pretrained(
            folder / "plain", dtype=DTYPE, quantization_config=of_pipeline(method), **ABSENT
        ).save_pretrained(folder / method)
    rows = []
    for way in WAYS[:1] + WAYS[2:] if method == "gguf-q8_0" else WAYS:
        # Processes of their own: what one leaves on the GPU would be counted for the next.
        [whole] = launch(session, method, way, folder, None, device, side, nproc=1)
        ranks = launch(session, method, way, folder, stages, device, side, nproc=stages)
        equal = [all(map(torch.equal, whole["images"], rank["images"])) for rank in ranks]
        rows.append(
            dict(
                method=method,
                way="from the file" if method == "gguf-q8_0" and way == WAYS[0] else way,
                equal=all(equal),
                finite=bool(torch.isfinite(whole["images"][0]).all()),
                whole_bytes=whole["bytes"],
                stage_bytes=[rank["bytes"] for rank in ranks],
                whole_peak_bytes=whole.get("peak"),
                stage_peak_bytes=[rank.get("peak") for rank in ranks],
                whole_seconds=round(whole["seconds"], 2),
                stage_seconds=[round(rank["seconds"], 2) for rank in ranks],
            )
        )
        print(rows[-1], flush=True)
        gc.collect()
    return rows


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
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        save_plain(Path(made) / "plain", arguments.heads, arguments.device)
        for method in arguments.methods:
            rows += measure(method, Path(made), arguments.stages, arguments.device, arguments.side)
    mib = 2.0**20
    show(
        f"FLUX of 2 + 4 blocks, {arguments.heads} heads, on {arguments.device}",
        [
            {
                "method": row["method"],
                "stages": row["way"],
                "same bits": "yes" if row["equal"] and row["finite"] else "NO",
                "whole, MiB": f"{row['whole_bytes'] / mib:.0f}",
                "each rank, MiB": ", ".join(f"{size / mib:.0f}" for size in row["stage_bytes"]),
                "seconds, whole": f"{row['whole_seconds']:.1f}",
                "seconds, ranks": f"{max(row['stage_seconds']):.1f}",
            }
            for row in rows
        ],
    )
    write(arguments.json, {"device": arguments.device, "heads": arguments.heads, "rows": rows})
    if not all(row["equal"] and row["finite"] for row in rows):
        raise SystemExit("a stage gave other bits than the whole")


if __name__ == "__main__":
    main()
