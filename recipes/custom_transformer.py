"""A hand-written Wan transformer that runs as one stage of a pipeline: what `custom_wan_pipeline.py` denoises with.

It differs from diffusers' on purpose, as hand-written ones do: queries, keys and values are one matrix, and names are its own.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed, WanTimeTextImageEmbedding
from safetensors import safe_open
from torch import nn

from dit_pipelining.errors import CheckpointError
from dit_pipelining.mixins import IntermediateTensors, get_pp_group, is_pp_missing_parameter, make_layers
from dit_pipelining.mixins.layers import PPMissingLayer

RENAMED = (
    ("attn1.", "self_attention."),
    ("attn2.", "cross_attention."),
    ("to_out.0.", "to_out."),
    ("ffn.net.0.proj.", "ffn.0."),
    ("ffn.net.2.", "ffn.2."),
)
"""Parts of the checkpoint's names, and what they are here."""

STACKED_PARAMS_MAPPING = (
    ("self_attention.to_qkv.", "self_attention.to_q.", 0),
    ("self_attention.to_qkv.", "self_attention.to_k.", 1),
    ("self_attention.to_qkv.", "self_attention.to_v.", 2),
    ("cross_attention.to_kv.", "cross_attention.to_k.", 0),
    ("cross_attention.to_kv.", "cross_attention.to_v.", 1),
)
"""A fused matrix here, a matrix of the checkpoint, and which part of the rows it is."""


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int) -> torch.Tensor:
    """Attention of (batch, tokens, dim) or (batch, tokens, heads, head_dim); gives (batch, tokens, dim)."""
    by_head = (x if x.ndim == 4 else x.unflatten(2, (heads, -1)) for x in (query, key, value))
    query, key, value = (x.transpose(1, 2) for x in by_head)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def rotate(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn pairs of channels of (batch, tokens, heads, head_dim) by their position's angles."""
    cos, sin = rotary[0][..., 0::2], rotary[1][..., 1::2]
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(x)


class Attention(nn.Module):
    """Self-attention with one matrix for queries, keys and values; cross-attention with one for keys and values."""

    def __init__(self, dim: int, heads: int, eps: float, *, cross: bool) -> None:
        super().__init__()
        self.heads = heads
        if cross:
            self.to_q, self.to_kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        else:
            self.to_qkv = nn.Linear(dim, 3 * dim)
        self.norm_q, self.norm_k = nn.RMSNorm(dim, eps=eps), nn.RMSNorm(dim, eps=eps)
        self.to_out = nn.Linear(dim, dim)

    def forward(
        self, x: torch.Tensor, text: torch.Tensor | None = None, rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        if text is None:
            query, key, value = self.to_qkv(x).chunk(3, dim=-1)
        else:
            query, (key, value) = self.to_q(x), self.to_kv(text).chunk(2, dim=-1)
        query, key = self.norm_q(query), self.norm_k(key)
        if rotary is not None:
            query, key = (rotate(one.unflatten(2, (self.heads, -1)), rotary) for one in (query, key))
        return self.to_out(attend(query, key, value, self.heads).type_as(x))


class Block(nn.Module):
    def __init__(self, dim: int, ffn_dim: int, heads: int, eps: float) -> None:
        super().__init__()
        self.norm1, self.norm3 = (FP32LayerNorm(dim, eps, elementwise_affine=False) for _ in range(2))
        self.norm2 = FP32LayerNorm(dim, eps, elementwise_affine=True)
        self.self_attention = Attention(dim, heads, eps, cross=False)
        self.cross_attention = Attention(dim, heads, eps, cross=True)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(ffn_dim, dim))
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 6, dim))

    def forward(
        self, x: torch.Tensor, text: torch.Tensor, modulation: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """One block: x is (batch, tokens, dim), text (batch, words, dim), modulation (batch, 6, dim)."""
        parts = (self.scale_shift_table + modulation.float()).chunk(6, dim=1)
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = parts
        attended = self.self_attention((self.norm1(x.float()) * (1 + scale) + shift).type_as(x), rotary=rotary)
        x = (x.float() + attended * gate).type_as(x)
        x = x + self.cross_attention(self.norm2(x.float()).type_as(x), text)
        fed = self.ffn((self.norm3(x.float()) * (1 + ffn_scale) + ffn_shift).type_as(x))
        return (x.float() + fed.float() * ffn_gate).type_as(x)


class StagedWanTransformer(nn.Module):
    """The blocks of this rank's stage, the patch embedding on the first, the output layer on the last.

    Args:
        config: a diffusers `transformer/config.json`.
        partition: blocks per stage, such as `"8,12,12,8"`; see `make_layers`.
    """

    def __init__(self, config: dict[str, Any], partition: str | None = None) -> None:
        super().__init__()
        heads, eps, patch = config["num_attention_heads"], config["eps"], tuple(config["patch_size"])
        dim = heads * config["attention_head_dim"]
        group = get_pp_group()
        self.patch_size, self.in_channels = patch, config["in_channels"]
        self.rope = WanRotaryPosEmbed(config["attention_head_dim"], patch, config["rope_max_seq_len"])
        self.condition_embedder = WanTimeTextImageEmbedding(dim, config["freq_dim"], 6 * dim, config["text_dim"])
        self.patch_embedding = (
            nn.Conv3d(self.in_channels, dim, patch, patch) if group.is_first_rank else PPMissingLayer()
        )
        self.start, self.end, self.blocks = make_layers(
            config["num_layers"], lambda prefix: Block(dim, config["ffn_dim"], heads, eps), "blocks", partition
        )
        self.norm_out = FP32LayerNorm(dim, eps, elementwise_affine=False)
        outputs = config["out_channels"] * patch[0] * patch[1] * patch[2]
        self.proj_out = nn.Linear(dim, outputs) if group.is_last_rank else PPMissingLayer()
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 2, dim))

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> tuple[torch.Tensor] | IntermediateTensors:
        """One stage.

        Args:
            hidden_states: latents (batch, channels, frames, height, width). Later stages look at their shape only.
            timestep: (batch,)
            encoder_hidden_states: (batch, words, text_dim)
            intermediate_tensors: from the stage before, `hidden_states` (batch, tokens, dim).

        Raises:
            ValueError: this is not the first stage, and it got nothing to continue from.
        """
        group = get_pp_group()
        rotary, shape = self.rope(hidden_states), hidden_states.shape
        if group.is_first_rank:
            hidden_states = self.patch_embedding(hidden_states).flatten(2).transpose(1, 2).contiguous()
        elif intermediate_tensors is None:
            raise ValueError(
                f"stage {group.rank_in_group} of {group.world_size} was called without intermediate_tensors; only the first "
                "stage starts from latents. Call it through predict_noise_maybe_with_cfg, which receives them."
            )
        else:
            hidden_states = intermediate_tensors["hidden_states"]
        embedded, modulation, text, _ = self.condition_embedder(timestep, encoder_hidden_states)
        for block in self.blocks[self.start : self.end]:
            hidden_states = block(hidden_states, text, modulation.unflatten(1, (6, -1)), rotary)
        if not group.is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states})
        shift, scale = (self.scale_shift_table + embedded.unsqueeze(1)).chunk(2, dim=1)
        hidden_states = (self.norm_out(hidden_states.float()) * (1 + scale) + shift).type_as(hidden_states)
        return (self._unpatchify(self.proj_out(hidden_states), shape),)

    def _unpatchify(self, tokens: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        grid = [size // patch for size, patch in zip(shape[2:], self.patch_size, strict=True)]
        pieces = tokens.reshape(shape[0], *grid, *self.patch_size, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return pieces.flatten(6, 7).flatten(4, 5).flatten(2, 3)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill this stage's parameters from a diffusers checkpoint's tensors; those of other stages are skipped.

        Returns:
            names of the parameters that were filled.

        Raises:
            CheckpointError: a tensor has no place here, or a parameter (or a part of a fused one) got none.
        """
        parameters = dict(self.named_parameters())
        # A fused matrix is filled in parts; "name[1]" is its second.
        fused = {name: [at for whole, _, at in STACKED_PARAMS_MAPPING if whole in name] for name in parameters}
        missing = {f"{name}[{at}]" for name in parameters for at in fused[name] or [0]}
        filled = set()
        for checkpoint_name, weight in weights:
            name, at = renamed(checkpoint_name), 0
            if is_pp_missing_parameter(name, self):
                continue
            for whole, part, place in STACKED_PARAMS_MAPPING:
                if part in name:
                    name, at = name.replace(part, whole), place
                    break
            if name not in parameters:
                raise CheckpointError(f"{checkpoint_name} of the checkpoint has no place in this transformer ({name})")
            rows = len(parameters[name]) // max(len(fused[name]), 1)
            parameters[name].data.narrow(0, at * rows, rows).copy_(weight)
            missing.discard(f"{name}[{at}]")
            filled.add(name)
        if missing:
            names = ", ".join(sorted(missing)[:5])
            raise CheckpointError(f"the checkpoint lacks {len(missing)} of this stage's tensors: {names}")
        return filled


def renamed(name: str) -> str:
    """The checkpoint's name as this transformer has it."""
    for theirs, ours in RENAMED:
        name = name.replace(theirs, ours)
    return name


def stream_weights(folder: Path, transformer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """One tensor after another of a folder's safetensors files; those of other stages are not read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no safetensors files")
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no dict
                if not is_pp_missing_parameter(renamed(name), transformer):
                    yield name, file.get_tensor(name)
