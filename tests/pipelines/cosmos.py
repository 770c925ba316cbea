"""Cosmos."""

from typing import Any

from diffusers import EDMEulerScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from tests.zoo import cosmos as zoo

from .autoencoders import cosmos_vae, wan_vae
from .case import PipelineCase, dit, picture, pictures
from .embeds import embeds
from .encoders import VOCABULARY, t5, tokenizer

TEXT = dict(prompt="a red cat", negative_prompt="blue", height=32, width=32, max_sequence_length=16)
EMBEDS = dict(prompt_embeds=embeds(1, 7, 16), negative_prompt_embeds=embeds(1, 7, 16, seed=1), height=32, width=32)


class NothingUnsafe:
    """Stands in for the safety checker, which is a package of its own."""

    def to(self, *_: Any) -> "NothingUnsafe":
        return self

    def check_text_safety(self, _: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


def _one(**changes: Any) -> dict[str, Any]:
    return dict(
        text_encoder=t5(16),
        tokenizer=tokenizer(),
        transformer=dit("CosmosTransformer3DModel", zoo.COSMOS, **changes),
        vae=cosmos_vae(),
        scheduler=EDMEulerScheduler(sigma_min=0.002, sigma_max=80, sigma_data=0.5, final_sigmas_type="sigma_min"),
        safety_checker=NothingUnsafe(),
    )


def _two(**changes: Any) -> dict[str, Any]:
    return _one(**changes) | dict(vae=wan_vae(), scheduler=FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True))


def _two_five(**changes: Any) -> dict[str, Any]:
    return _one(in_channels=5, **changes) | dict(
        vae=wan_vae(), scheduler=UniPCMultistepScheduler(), text_encoder=None, tokenizer=None
    )


def _omni() -> dict[str, Any]:
    tokens = tokenizer()
    tokens.add_tokens(["<|vision_start|>"], special_tokens=True)
    return dict(
        transformer=dit("Cosmos3OmniTransformer", zoo.OMNI, vocab_size=VOCABULARY),
        text_tokenizer=tokens,
        vae=wan_vae(2),
        scheduler=UniPCMultistepScheduler(),
        enable_safety_checker=False,
    )


CASES = (
    PipelineCase("CosmosTextToWorldPipeline", _one, TEXT | dict(num_frames=9)),
    PipelineCase(
        "CosmosVideoToWorldPipeline", lambda: _one(in_channels=5), TEXT | dict(num_frames=9, video=pictures(9, 32, 32))
    ),
    PipelineCase("Cosmos2TextToImagePipeline", _two, TEXT),
    PipelineCase(
        "Cosmos2VideoToWorldPipeline", lambda: _two(in_channels=5), TEXT | dict(num_frames=9, image=picture(32, 32))
    ),
    PipelineCase("Cosmos2_5_PredictBasePipeline", _two_five, EMBEDS | dict(num_frames=9, video=pictures(9, 32, 32))),
    PipelineCase(
        "Cosmos3OmniPipeline",
        _omni,
        dict(prompt="a red cat", negative_prompt="blue", height=32, width=32, num_frames=5, enable_safety_check=False),
    ),
)
