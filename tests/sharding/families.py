"""The model families of the README's table, each as a tiny model whose heads can be shared by four ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.zoo import CASES
from tests.zoo.case import Case


@dataclass(frozen=True)
class Family:
    """A row of the table.

    Attributes:
        case: of the zoo.
        heads: what its configuration gets beside, so that there are four heads.
        pipeline: of `tests/pipelines`, run over ranks.
        vae: the class of its VAE, of `tests/vaes`; None: it has none that takes tiles.
    """

    case: str
    heads: Mapping[str, Any]
    pipeline: str
    vae: str | None

    def with_four_heads(self) -> Case:
        case = CASES[self.case]
        return replace(case, init={**case.init, **self.heads})


FOUR = dict(num_attention_heads=4)
FAMILIES: Mapping[str, Family] = {
    "Wan": Family("WanTransformer3D", FOUR, "WanPipeline", "AutoencoderKLWan"),
    "FLUX": Family("FluxTransformer", FOUR, "FluxPipeline", "AutoencoderKL"),
    "FLUX.2": Family("Flux2Transformer", FOUR, "Flux2Pipeline", "AutoencoderKLFlux2"),
    "Qwen-Image": Family("QwenImageTransformer", {}, "QwenImagePipeline", "AutoencoderKLQwenImage"),
    "SD3 and 3.5": Family("SD35Transformer", {}, "StableDiffusion3Pipeline", "AutoencoderKL"),
    "HunyuanVideo": Family("HunyuanVideoTransformer", FOUR, "HunyuanVideoPipeline", "AutoencoderKLHunyuanVideo"),
    "LTX": Family("LTXTransformer", {**FOUR, "cross_attention_dim": 32}, "LTXPipeline", "AutoencoderKLLTXVideo"),
    "LTX-2": Family(
        "LTX2Transformer",
        {**FOUR, "cross_attention_dim": 32, "audio_num_attention_heads": 4, "audio_cross_attention_dim": 16},
        "LTX2Pipeline",
        "AutoencoderKLLTX2Video",
    ),
    "CogVideoX": Family("CogVideoXTransformer", FOUR, "CogVideoXPipeline", "AutoencoderKLCogVideoX"),
}
"""By name in the table."""
