"""The sequential reference of a stream: the unsplit diffusers model, chunk after chunk, level after level.

It shares the noise with the code under test, and nothing else: the context is a dictionary of keys and values by slot, and
rotary tables come from diffusers' own module with a table long enough for all positions.
"""

from dataclasses import replace
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor, WanRotaryPosEmbed
from torch.nn import functional as F

from dit_pipelining.stream.noise import NoiseSource
from dit_pipelining.stream.spec import StreamSpec

SHAPE = (1, 4, 2, 8, 8)
"""Of the latents of one chunk: two frames."""

TEXT = (1, 6, 12)


def model(dtype: torch.dtype = torch.float32, layers: int = 4, seed: int = 0) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    made = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=32,
        num_layers=layers,
        rope_max_seq_len=32,
    )
    return made.to(dtype).eval()


def text(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(TEXT, generator=torch.Generator().manual_seed(seed)).to(dtype)


def video(count: int, seed: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=generator) for _ in range(count)]


class _Context:
    """What one pass of one chunk sees, and where it writes."""

    def __init__(self, frames: int, sinks: int, window: int) -> None:
        self.frames, self.sinks, self.window = frames, sinks, window
        self.position = 0
        self.kept: list[dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = []


class _ReferenceAttention(WanAttnProcessor):
    def __init__(self, block: int, state: "Reference") -> None:
        super().__init__()
        self.block, self.state = block, state

    def __call__(self, attn: Any, hidden_states: Any, encoder_hidden_states: Any, mask: Any, rotary_emb: Any) -> Any:
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        key = attn.norm_k(attn.to_k(hidden_states)).unflatten(2, (attn.heads, -1))
        value = attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))
        context, keys, values = self.state.cache, [], []
        slots = context[self.block]
        position, spec = self.state.position, self.state.spec
        chunks_before = position // spec.frames_per_chunk
        sinks, ring = spec.sinks // spec.frames_per_chunk, spec.window // spec.frames_per_chunk + 1
        slot = chunks_before if chunks_before < sinks else sinks + (chunks_before - sinks) % ring
        slots[slot] = (position, key, value)
        moved = max(0, position - spec.sinks - spec.window)
        for number in sorted(slots):
            frame, own_key, own_value = slots[number]
            keys.append(self.state.rotated(own_key, frame + moved if number < sinks else frame))
            values.append(own_value)
        query = self.state.rotated(query, position)
        parts = [part.transpose(1, 2) for part in (query, torch.cat(keys, dim=1), torch.cat(values, dim=1))]
        out = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2, 3)
        return attn.to_out[1](attn.to_out[0](out.type_as(query)))


class Reference:
    """Runs streams one after the other."""

    def __init__(self, transformer: WanTransformer3DModel, spec: StreamSpec, seed: int = 0) -> None:
        self.transformer, self.spec = transformer, spec
        self.latent_dtype = torch.float64 if transformer.dtype == torch.float64 else torch.float32
        self.noise = NoiseSource(seed, SHAPE, self.latent_dtype, torch.device("cpu"))
        config = transformer.config
        self.rope = WanRotaryPosEmbed(config.attention_head_dim, config.patch_size, 8192)
        self.position = 0
        self.cache: list[dict[int, Any]] = []
        for number, block in enumerate(transformer.blocks):
            block.attn1.set_processor(_ReferenceAttention(number, self))

    def rotated(self, states: torch.Tensor, frame: int) -> torch.Tensor:
        """Rotated for the frames of a chunk that starts at `frame`."""
        _, channels, frames, height, width = SHAPE
        cos, sin = self.rope(torch.empty(1, channels, frame + frames, height, width))
        tokens = states.shape[1]
        cos, sin = cos[:, -tokens:, :, 0::2], sin[:, -tokens:, :, 1::2]
        one, two = states.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([one * cos - two * sin, one * sin + two * cos], dim=-1).flatten(-2).type_as(states)

    @torch.no_grad()
    def run(
        self,
        stream: int,
        chunks: int,
        prompts: dict[int, torch.Tensor],
        negative: torch.Tensor | None = None,
        source: list[torch.Tensor] | None = None,
        scales: list[float] | None = None,
        starts: tuple[int, ...] = (0,),
        changes: dict[int, tuple[tuple[float, ...], list[int]]] | None = None,
    ) -> list[torch.Tensor]:
        """The clean chunks of one stream; prompts by the first chunk that shows them, `starts` where it forgets the past.

        With `changes` other levels from a chunk on, and for each the number of the old one whose context it takes over.
        """
        spec, blocks = self.spec, len(self.transformer.blocks)
        levels, done, first = spec.num_levels, [], 0
        caches: list[Any] = []
        for chunk in range(chunks):
            if chunk in (changes or {}):
                assert changes is not None
                own_levels, taken = changes[chunk]
                spec = self.spec = replace(spec, levels=own_levels)
                levels = spec.num_levels
                caches = [[[dict(block) for block in branch[old]] for old in taken] for branch in caches]
            if chunk in starts:
                caches = [[[{} for _ in range(blocks)] for _ in range(levels)] for _ in range(2)]
                first = chunk
            self.position = (chunk - first) * spec.frames_per_chunk
            shown = prompts[max(start for start in prompts if start <= chunk)]
            scale = spec.levels[0] if scales is None else scales[chunk]
            sigmas = [scale if i == 0 else level * scale / spec.levels[0] for i, level in enumerate(spec.levels)]
            if scale == spec.levels[0]:
                sigmas = list(spec.levels)
            drawn = self.noise(stream, chunk, 0)
            x = scale * drawn if source is None else (1 - scale) * source[chunk].to(self.latent_dtype) + scale * drawn
            for level, sigma in enumerate(sigmas):
                flow = self._flow(x, sigma, level, shown, caches[0])
                if spec.guidance_scale > 1:
                    assert negative is not None
                    without = self._flow(x, sigma, level, negative, caches[1])
                    flow = without + spec.guidance_scale * (flow - without)
                clean = x - sigma * flow.to(self.latent_dtype)
                if level < levels - 1:
                    x = (1 - sigmas[level + 1]) * clean + sigmas[level + 1] * self.noise(stream, chunk, level + 1)
            if spec.policy == "clean":
                self._flow(clean, 0.0, 0, shown, caches[0])
                if spec.guidance_scale > 1:
                    self._flow(clean, 0.0, 0, negative, caches[1])
            done.append(clean)
        return done

    def _flow(self, x: torch.Tensor, sigma: float, level: int, shown: Any, caches: list[Any]) -> torch.Tensor:
        self.cache = caches[level if self.spec.policy == "level" else 0]
        dtype = self.transformer.dtype
        time = torch.tensor([sigma * 1000], dtype=torch.float32)
        flow: torch.Tensor = self.transformer(x.to(dtype), time, shown.to(dtype), return_dict=False)[0]
        return flow
