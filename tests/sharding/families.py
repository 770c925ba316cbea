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
        pipeline: of `tests/pipelines`, run over ranks; None: there is none for this class.
        vae: the class of its VAE, of `tests/vaes`; None: it has none that takes tiles.
    """

    case: str
    heads: Mapping[str, Any]
    pipeline: str | None
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
    "ChronoEdit": Family(
        "ChronoEditTransformer3D", {**FOUR, "added_kv_proj_dim": 48}, "ChronoEditPipeline", "AutoencoderKLWan"
    ),
    "Helios": Family("HeliosTransformer3D", FOUR, "HeliosPipeline", "AutoencoderKLWan"),
    "MiniMax-H3": Family("MiniMaxH3Transformer", FOUR, None, None),
    "CogVideoX": Family("CogVideoXTransformer", FOUR, "CogVideoXPipeline", "AutoencoderKLCogVideoX"),
}
"""By name in the table: those whose tokens can be split."""

OTHERS: Mapping[str, str] = {
    "ACE-Step": "AceStepTransformer1DModel",
    "Allegro": "AllegroTransformer",
    "AnyFlow": "AnyFlowTransformer3D",
    "AuraFlow": "AuraFlowTransformer",
    "Bria": "BriaTransformer",
    "Bria FIBO": "BriaFiboTransformer",
    "Bria FIBO 2": "BriaFibo2Transformer2DModel",
    "Chroma": "ChromaTransformer",
    "CogView3-Plus": "CogView3PlusTransformer",
    "CogView4": "CogView4Transformer",
    "ConsisID": "ConsisIDTransformer",
    "Cosmos": "CosmosTransformer",
    "Cosmos 3": "Cosmos3OmniTransformer",
    "DiT": "DiTTransformer2D",
    "DreamLite": "DreamLiteTransformer2D",
    "EasyAnimate": "EasyAnimateTransformer",
    "ERNIE-Image": "ErnieImageTransformer",
    "FLUX.3": "Flux3Transformer",
    "GLM-Image": "GlmImageTransformer",
    "HiDream": "HiDreamTransformer",
    "Hunyuan-DiT": "HunyuanDiT",
    "HunyuanImage": "HunyuanImageTransformer",
    "HunyuanVideo 1.5": "HunyuanVideo15Transformer",
    "FramePack": "HunyuanVideoFramepackTransformer",
    "Ideogram 4": "Ideogram4Transformer",
    "JoyImage": "JoyImageEditTransformer",
    "JoyImage Plus": "JoyImageEditPlusTransformer",
    "Kandinsky 5": "Kandinsky5Transformer3DModel",
    "Kandinsky 6": "Kandinsky6Transformer3DModel",
    "Kandinsky 6 SR": "Kandinsky6SRTransformer3DModel",
    "Krea 2": "Krea2Transformer",
    "Latte": "LatteTransformer",
    "LongCat-Audio": "LongCatAudioDiTTransformer",
    "LongCat-Image": "LongCatImageTransformer",
    "Lumina 2": "Lumina2Transformer",
    "MiniMax-Music 3": "MiniMaxMusic3Transformer1D",
    "its decoder": "MiniMaxMusic3RVQDepthDecoder",
    "Mochi": "MochiTransformer",
    "Motif-Video": "MotifVideoTransformer",
    "Nucleus": "NucleusMoEImageTransformer",
    "OmniGen": "OmniGenTransformer",
    "Ovis-Image": "OvisImageTransformer",
    "PixArt": "PixArtTransformer2D",
    "PRX": "PRXTransformer",
    "Qwen-Image 2.1": "QwenImage21Transformer2DModel",
    "Sana": "SanaTransformer",
    "Sana-Video": "SanaVideoTransformer",
    "SkyReels-V2": "SkyReelsV2Transformer3D",
    "Stable Audio": "StableAudioDiTModel",
    "Stable Audio 3": "StableAudio3DiTModel",
    "T5 FiLM": "T5FilmDecoder",
    "Transformer2D": "Transformer2D",
    "TransformerTemporal": "TemporalTransformer",
    "Wan VACE": "WanVACETransformer3D",
    "Wan-Animate": "WanAnimateTransformer3D",
    "Z-Image": "ZImageTransformer",
    # refused for tensor parallelism as well
    "AnyFlow FAR": "AnyFlowFARTransformer3D",
    "Lumina-Next": "LuminaNextDiT",
    "PriorTransformer": "PriorTransformer",
    "RFD4": "RFD4ProteinaTransformer",
    "Sana-WM": "SanaWMTransformer",
    "its refiner": "SanaWMLTX2RefinerTransformer",
    "Wan-Animate 2": "WanAnimate2Transformer3D",
}
"""The other classes, by name in the table: a case of the zoo."""

WITHOUT_PIPELINE = frozenset(
    {"ConsisID", "DreamLite", "FLUX.3", "Kandinsky 6 SR", "MiniMax-H3", "MiniMax-Music 3", "OmniGen", "RFD4", "T5 FiLM"}
    | {"Transformer2D", "TransformerTemporal", "Wan-Animate 2", "its decoder"}
)
"""Those that no pipeline of `tests/pipelines` has, so that none is run with shards of its weights."""
