"""A hand-written Wan pipeline with its own transformers and denoising loop: what `custom_pipeline.py` runs."""

import json
from pathlib import Path
from typing import Any

import torch
from custom_transformer import StagedWanTransformer, stream_weights
from diffusers import WanPipeline

from dit_pipelining.errors import CheckpointError
from dit_pipelining.mixins import CFGParallelMixin, IntermediateTensors, PipelineParallelMixin, get_pp_group


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
