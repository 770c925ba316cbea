r"""A hand-written Wan pipeline with its own transformers and denoising loop, its stages on the launched processes.

    torchrun --nproc-per-node 2 recipes/custom_pipeline.py --model recipes/tiny_wan --height 96 --width 96 --num-frames 25 \
        --num-inference-steps 10 --prompt "a red circle moves right on a black background" --output outputs/custom.mp4

`PORTING.md` explains what makes it a pipeline of stages. With two transformers (Wan 2.2) the boundary ratio says which
steps are whose; with 1.0 or 0.0 only one is loaded.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import DTYPES, check_output, run, save_video
from custom_transformer import StagedWanTransformer, stream_weights
from diffusers import WanPipeline

from dit_pipelining.errors import CheckpointError
from dit_pipelining.mixins import (
    CFGParallelMixin,
    IntermediateTensors,
    PipelineParallelMixin,
    destroy_distributed_env,
    get_pp_group,
    get_world_group,
    init_distributed_environment,
    initialize_model_parallel,
)


class CustomWanPipeline(PipelineParallelMixin, CFGParallelMixin):
    """Text to video; every rank calls it.

    Args:
        folder: a diffusers pipeline.
        dtype: of the transformers.
        boundary_ratio: steps from this share of the noise on are the first transformer's, those below the second's; default:
            the checkpoint's. 0.0 needs the first transformer only, 1.0 the second.
        partition: blocks per stage, such as `"8,12,12,8"`.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        boundary_ratio: float | None = None,
        partition: str | None = None,
    ) -> None:
        self.folder, self.dtype, self.device = folder, dtype, get_pp_group().device
        # What is not the denoiser is diffusers': text encoder, VAE, scheduler.
        self.components = WanPipeline.from_pretrained(folder, transformer=None, transformer_2=None).to(self.device)
        self.vae, self.scheduler = self.components.vae, self.components.scheduler
        ratio = self.components.config.boundary_ratio
        self.boundary_ratio = ratio if boundary_ratio is None else boundary_ratio
        self.transformer = self._load("transformer", partition) if self.boundary_ratio != 1.0 else None
        two = self.boundary_ratio is not None and self.boundary_ratio != 0.0
        self.transformer_2 = self._load("transformer_2", partition) if two else None

    def _load(self, name: str, partition: str | None) -> StagedWanTransformer:
        config = self.folder / name / "config.json"
        if not config.exists():
            raise CheckpointError(f"a boundary ratio of {self.boundary_ratio} needs {name}, but there is no {config}")
        transformer = StagedWanTransformer(json.loads(config.read_text()), partition).to(self.device, self.dtype)
        transformer.load_weights(stream_weights(self.folder / name, transformer))
        return transformer.eval()

    def predict_noise(self, current_model: StagedWanTransformer | None = None, **kwargs: Any) -> Any:
        """One branch through one of the transformers."""
        result = (current_model or self.transformer)(**kwargs)
        return result if isinstance(result, IntermediateTensors) else result[0]

    def diffuse(
        self,
        latents: torch.Tensor,
        prompt_embeds: torch.Tensor,
        negative_prompt_embeds: torch.Tensor | None,
        guidance_scale: float,
        guidance_scale_2: float,
    ) -> torch.Tensor:
        """The denoising loop, as it would be for one process."""
        do_true_cfg = negative_prompt_embeds is not None
        boundary = (self.boundary_ratio or 0.0) * self.scheduler.config.num_train_timesteps
        for t in self.scheduler.timesteps:
            high_noise = self.transformer_2 is None or (self.transformer is not None and t >= boundary)
            inputs = {
                "current_model": self.transformer if high_noise else self.transformer_2,
                "hidden_states": latents.to(self.dtype),
                "timestep": t.expand(latents.shape[0]),
            }
            noise_pred = self.predict_noise_maybe_with_cfg(
                do_true_cfg=do_true_cfg,
                true_cfg_scale=guidance_scale if high_noise else guidance_scale_2,
                positive_kwargs={**inputs, "encoder_hidden_states": prompt_embeds},
                negative_kwargs={**inputs, "encoder_hidden_states": negative_prompt_embeds} if do_true_cfg else None,
                cfg_normalize=False,
            )
            latents = self.scheduler_step_maybe_with_cfg(noise_pred, t, latents, do_true_cfg)
        return latents

    @torch.inference_mode()
    def __call__(
        self,
        prompt: str,
        negative_prompt: str | None = None,
        height: int = 480,
        width: int = 832,
        num_frames: int = 81,
        num_inference_steps: int = 50,
        guidance_scale: float = 5.0,
        guidance_scale_2: float | None = None,
        seed: int = 0,
    ) -> Any:
        """The video (frames, height, width, 3) with values in [0, 1] on the first stage, None on the others."""
        do_true_cfg = guidance_scale > 1
        prompt_embeds, negative_prompt_embeds = self.components.encode_prompt(
            prompt, negative_prompt, do_true_cfg, device=self.device, max_sequence_length=512
        )
        self.scheduler.set_timesteps(num_inference_steps, device=self.device)
        generator = torch.Generator().manual_seed(seed)  # the same latents on every stage
        channels = (self.transformer or self.transformer_2).in_channels
        latents = self.components.prepare_latents(
            1, channels, height, width, num_frames, torch.float32, self.device, generator
        )
        latents = self.diffuse(
            latents,
            prompt_embeds.to(self.dtype),
            negative_prompt_embeds.to(self.dtype) if do_true_cfg else None,
            guidance_scale,
            guidance_scale if guidance_scale_2 is None else guidance_scale_2,
        )
        statistics = (self.vae.config.latents_mean, self.vae.config.latents_std)
        mean, std = (torch.tensor(values, device=self.device).view(1, -1, 1, 1, 1) for values in statistics)
        video = self.vae.decode((latents * std + mean).to(self.vae.dtype), return_dict=False)[0]
        if video is None:  # the first stage decodes
            return None
        return self.components.video_processor.postprocess_video(video, output_type="np")[0]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", type=Path, required=True, help="folder of a diffusers Wan pipeline")
    flags.add_argument("--prompt", required=True)
    flags.add_argument("--negative-prompt")
    for name in ("height", "width", "num-frames", "num-inference-steps"):
        flags.add_argument(f"--{name}", type=int)
    flags.add_argument("--guidance-scale", type=float)
    flags.add_argument("--guidance-scale-2", type=float, help="of the second transformer; default: the first's")
    flags.add_argument("--boundary-ratio", type=float, help="default: the checkpoint's")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--fps", type=int, default=12)
    flags.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    flags.add_argument("--output", type=Path, default=Path("custom.mp4"))
    flags.add_argument("--pipeline-parallel-size", type=int, metavar="STAGES", help="default: all launched processes")
    flags.add_argument("--cfg-parallel-size", type=int, default=1, metavar="PIPELINES")
    flags.add_argument("--partition", help="blocks per stage, for example 8,12,12,8")
    args = flags.parse_args()
    check_output(args.output, (".mp4", ".gif"))
    if "RANK" in os.environ:
        init_distributed_environment()
    else:  # started with python, as one process
        init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store")
    ranks = get_world_group().world_size
    initialize_model_parallel(
        pipeline_parallel_size=args.pipeline_parallel_size or max(ranks // args.cfg_parallel_size, 1),
        cfg_parallel_size=args.cfg_parallel_size,
    )
    pipeline = CustomWanPipeline(args.model, DTYPES[args.dtype], args.boundary_ratio, args.partition)
    call = (
        "negative_prompt",
        "height",
        "width",
        "num_frames",
        "num_inference_steps",
        "guidance_scale",
        "guidance_scale_2",
    )
    given = {name: getattr(args, name) for name in call if getattr(args, name) is not None}
    video = pipeline(args.prompt, seed=args.seed, **given)
    stages = [transformer for transformer in (pipeline.transformer, pipeline.transformer_2) if transformer is not None]
    blocks = ", ".join(f"blocks {stage.start} to {stage.end - 1} of {len(stage.blocks)}" for stage in stages)
    print(
        f"rank {get_world_group().rank}: stage {get_pp_group().rank_in_group} of {get_pp_group().world_size}, {blocks}"
    )
    if video is not None and get_world_group().is_first_rank:
        print(f"video: {save_video(video, args.output, args.fps)}")
    get_world_group().barrier()
    destroy_distributed_env()


if __name__ == "__main__":
    run(main)
