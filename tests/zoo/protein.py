"""RFD4 Proteina, a diffusion transformer over the tokens of a molecule and the pairs of them."""

import torch

from .case import Case, full, keep_first, randn, values

PROTEINA = dict(
    nlayers=4,
    token_dim=16,
    nheads=2,
    dim_cond=12,
    pair_repr_dim=8,
    latent_dim=4,
    token_type_emb_dim=6,
    t_emb_dim=16,
    xt_pair_dist_dim=10,
    feats_seq=("xt_bb_ca", "xt_local_latents", "token_type"),
    feats_cond_seq=("time_emb_bb_ca", "time_emb_local_latents", "recycle_remaining"),
    feats_pair_repr=("xt_bb_ca_pair_dists", "molecule_idx_pair"),
    feats_pair_cond=("time_emb_bb_ca", "time_emb_local_latents"),
    update_pair_repr_every_n=2,
    tri_mult_c=8,
    num_sequence_classes=9,
    recycle_conditioning_dim=2,
)
# Two molecules of 7 and 5 tokens; the first 2 tokens are given, and the last of the longer one has no side chain.
PROTEINA_INPUTS = dict(
    bb_ca=randn(2, 7, 3),
    local_latents=randn(2, 7, 4),
    bb_ca_time=full((2,), 0.3),
    local_latents_time=full((2,), 0.2),
    padding_mask=keep_first([7, 5], 7),
    token_type=values([[0, 0, 1, 1, 2, 3, 3]] * 2, torch.int64),
    conditioning=dict(
        is_in_context_conditioning=keep_first([2, 2], 7),
        supports_local_latent=keep_first([6, 5], 7),
        molecule_iid=values([[0, 0, 0, 1, 1, 1, 1]] * 2, torch.int64),
    ),
)

CASES = (
    Case("RFD4ProteinaTransformer", "RFD4ProteinaTransformer", PROTEINA, PROTEINA_INPUTS),
    # The block list runs twice in one call.
    Case(
        "RFD4ProteinaTransformer@recycled",
        "RFD4ProteinaTransformer",
        PROTEINA,
        PROTEINA_INPUTS | dict(recycle_depth=2),
    ),
)
