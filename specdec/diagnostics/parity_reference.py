"""The way vLLM 0.32.0 runs a drafter's directory, in plain torch, after its documented semantics.

Written apart from the drafter: the reference imports nothing of the package but its own files, and reads the checkpoint
by its own tensors' names. So it can say that a checkpoint is not the drafter that it was made of. Method
``eagle`` is EAGLE-1 and 2, ``eagle3`` EAGLE-3 and 3.1, and P-EAGLE, ``dflash`` DFlash, ``dspark`` DSpark.

Legend: T tokens, A anchors, K depths, M new nodes, S keys, H width, W input width, h query heads, g key heads, n heads,
d head width, r rotated width, V target vocabulary, D draft vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.diagnostics.parity_files import (
    CONFIDENCE,
    EMBEDDING,
    MARKOV_1,
    MARKOV_2,
    MASK,
    ServedDrafter,
)
from specdec.diagnostics.parity_quantized import moved, round_tokens


class Reading(NamedTuple):
    """What a checkpoint drafts."""

    features_AKH: Tensor  # read by each step
    log_probs_AKV: Tensor  # of the token after next, -inf where the drafter has no such token
    confidence_AK: Tensor | None = None  # what a confidence head says of each draft


# Keys and values by layer, (g, S, d) each; column j stands at position j.
Past = dict[int, tuple[Tensor, Tensor]]


def draft(
    served: ServedDrafter, ids_T: Tensor, features_TH: Tensor, anchors: Sequence[int], depth: int,
    given_AK: Tensor | None = None,
) -> Reading:  # fmt: skip
    """Run the text once over its features, then chains from anchors.

    An anchor is a place whose feature is the target's own. At depth k its chain has read k given tokens instead of
    its own drafts. A parallel drafter (https://arxiv.org/abs/2602.01469) reads its mask token and learned states
    instead.

    Args:
        given_AK: the tokens that the chains read; by default the text's next ones.
    """
    settings = served.settings
    if settings.block_size:
        return draft_blocks(served, ids_T, features_TH, anchors, depth, given_AK)
    past: Past = {}
    # The chains may run beyond the end of the text.
    positions_T = torch.arange(len(ids_T) + depth, device=ids_T.device)
    feedback_TH, hidden_TH = step(
        served, ids_T[1:], features_TH[:-1], positions_T[: len(ids_T) - 1], past
    )
    mask = settings.mask_token
    if mask is not None:
        mask_1 = torch.full_like(ids_T[:1], mask)
        learned = served.weights[MASK].view(1, -1).split(settings.target_width, -1)
        learned_1H = fuse(served, list(learned))
    features = []
    hidden = []
    for row, anchor in enumerate(anchors):
        chain_past = _up_to(past, anchor)
        given_K = ids_T[anchor + 2 : anchor + 2 + depth] if given_AK is None else given_AK[row]
        feature_1H = feedback_TH[anchor : anchor + 1]
        features.append(features_TH[anchor])
        hidden.append(hidden_TH[anchor])
        for k in range(depth):
            token_1 = given_K[k : k + 1]
            if mask is not None:
                token_1 = mask_1
                feature_1H = learned_1H
            features.append(feature_1H[0])
            position_1 = positions_T[anchor + 1 + k : anchor + 2 + k]
            feature_1H, hidden_1H = step(served, token_1, feature_1H, position_1, chain_past)
            hidden.append(hidden_1H[0])
    return _by_anchor(served, features, hidden, len(anchors))


def _up_to(past: Past, anchor: int) -> Past:
    return {
        i: (k_gSd[:, : anchor + 1], v_gSd[:, : anchor + 1]) for i, (k_gSd, v_gSd) in past.items()
    }


def _by_anchor(
    served: ServedDrafter,
    features: list[Tensor],
    hidden: list[Tensor],
    anchors: int,
    added: list[Tensor] | None = None,
) -> Reading:
    """Return features, and log-probabilities over the target's vocabulary, float32 at least.

    Args:
        added: to the logits, (D,) each.
    """
    logits_ND = project(served, "lm_head", torch.stack(hidden)) * served.settings.logit_scale
    if added:
        logits_ND = logits_ND + torch.stack(added)
    log_ND = logits_ND.log_softmax(-1, dtype=torch.promote_types(logits_ND.dtype, torch.float32))
    log_NV = log_ND.new_full((len(hidden), served.settings.vocab_size), float("-inf"))
    log_NV = log_NV.index_copy(1, served.target_ids_D, log_ND)
    return Reading(*(x.unflatten(0, (anchors, -1)) for x in (torch.stack(features), log_NV)))


def draft_blocks(
    served: ServedDrafter, ids_T: Tensor, features_TH: Tensor, anchors: Sequence[int], depth: int,
    given_AK: Tensor | None = None,
) -> Reading:  # fmt: skip
    """Run a block drafter (https://arxiv.org/abs/2602.06036); see :func:`draft`.

    Behind every anchor stand its next token and the masks. They see each other and, in every layer, keys and values of
    the features up to the anchor. DSpark (https://github.com/deepseek-ai/DeepSpec) adds to a draft's logits what its
    Markov head says of the token before it.
    """
    settings = served.settings
    context_TH = rms(served, "hidden_norm", features_TH)
    positions_T = torch.arange(len(ids_T), device=ids_T.device)
    layers = range(settings.num_hidden_layers)
    past = {i: heads(served, f"layers.{i}.self_attn", context_TH, positions_T)[1:] for i in layers}
    masks = torch.full_like(ids_T[:1], settings.mask_token or 0).expand(settings.block_size - 1)
    features = []
    hidden: list[Tensor] = []
    added: list[Tensor] = []
    estimates: list[Tensor] = []
    first = settings.first_draft
    for row, anchor in enumerate(anchors):
        block_past = _up_to(past, anchor)
        x_MH = served.weights[EMBEDDING][torch.cat([ids_T[anchor + 1 : anchor + 2], masks])]
        positions_M = anchor + 1 + torch.arange(settings.block_size, device=ids_T.device)
        for i in layers:
            normed_MH = rms(served, f"layers.{i}.input_layernorm", x_MH)
            x_MH = x_MH + attention(served, i, normed_MH, positions_M, block_past, whole=True)
            x_MH = x_MH + feed_forward(served, i, x_MH)
        normed_KH = rms(served, "norm", x_MH)[first : first + depth + 1]
        hidden += normed_KH
        handed_KH = x_MH[first : first + depth]
        if settings.markov_rank:
            handed_KH = normed_KH[:depth]
            next_K = ids_T[anchor + 2 : anchor + 2 + depth] if given_AK is None else given_AK[row]
            previous_K = torch.cat([ids_T[anchor + 1 : anchor + 2], next_K[:depth]])
            embedded_KR = served.weights[MARKOV_1][previous_K]
            added += F.linear(embedded_KR, served.weights[MARKOV_2])
            if settings.confidence:
                read_KW = torch.cat([normed_KH, embedded_KR], -1)
                estimates += project(served, CONFIDENCE, read_KW)[:, 0].sigmoid()
        features += [features_TH[anchor], *handed_KH]
    reading = _by_anchor(served, features, hidden, len(anchors), added)
    if estimates:
        confidence_AK = torch.stack(estimates).unflatten(0, (len(anchors), -1))
        reading = reading._replace(confidence_AK=confidence_AK)
    return reading


def fuse(served: ServedDrafter, states: list[Tensor]) -> Tensor:
    """Return the feature (M, H) of the target's states, each (M, H of the target); fed-back features are not fused."""
    read = served.settings
    if not read.aux_ids:
        (final_MH,) = states
        return final_MH
    joined = torch.cat(states, -1)
    if read.norm_before_fc:
        joined = rms(served, "input_norm", joined)
    if read.fc_norm:
        chunks = enumerate(joined.chunk(len(states), -1))
        joined = torch.cat([rms(served, f"fc_norm.{n}", chunk) for n, chunk in chunks], -1)
    return project(served, "fc", joined)


def step(
    served: ServedDrafter, tokens_M: Tensor, features_MH: Tensor, positions_M: Tensor, past: Past
) -> tuple[Tensor, Tensor]:
    """Run M nodes, each a token and the feature of the place before it, at the feature's position.

    They see each other causally, and all of ``past``.

    Returns:
        The next step's features (M, H), and what the head multiplies (M, H).
    """
    read = served.settings
    embedded_MH = served.weights[EMBEDDING][tokens_M]
    # EAGLE-1 (https://arxiv.org/abs/2401.15077) has no norm on the way in and none on the way out.
    if read.method == "eagle":
        residual_MH = input_MW = project(served, "fc", torch.cat([embedded_MH, features_MH], -1))
    else:  # EAGLE-3: https://arxiv.org/abs/2503.01840
        hidden_MH = rms(served, "layers.0.hidden_norm", features_MH)
        input_MW = torch.cat([rms(served, "layers.0.input_layernorm", embedded_MH), hidden_MH], -1)
        residual_MH = hidden_MH if read.norm_before_residual else features_MH
    h_MH = residual_MH + attention(served, 0, input_MW, positions_M, past)
    h_MH = h_MH + feed_forward(served, 0, h_MH)
    for i in range(1, read.num_hidden_layers):
        normed_MH = rms(served, f"layers.{i}.input_layernorm", h_MH)
        h_MH = h_MH + attention(served, i, normed_MH, positions_M, past)
        h_MH = h_MH + feed_forward(served, i, h_MH)
    if read.method == "eagle":
        return h_MH, h_MH
    normed_MH = rms(served, "norm", h_MH)
    # EAGLE-3.1: https://arxiv.org/abs/2605.09992
    return normed_MH if read.norm_output else h_MH, normed_MH


def rms(served: ServedDrafter, name: str, x: Tensor) -> Tensor:
    """Scale to a root mean square of 1 over the last axis, in float32 at least, and multiply by the weight."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = F.rms_norm(wide, wide.shape[-1:], eps=served.settings.rms_norm_eps)
    return unit.to(x.dtype) * served.weights[f"{name}.weight"]


def project(served: ServedDrafter, name: str, x: Tensor) -> Tensor:
    """Multiply by a matrix, in eight bits as the engine does if the file has them, and add its bias if it has one."""
    if name in served.rounded:
        x = round_tokens(moved(x, served.nudge), served.rounded[name])
    return F.linear(x, served.weights[f"{name}.weight"], served.weights.get(f"{name}.bias"))


def heads(
    served: ServedDrafter, at: str, x_MW: Tensor, positions_M: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (h, M, d), keys and values (g, M, d)."""
    read = served.settings
    q_hMd, k_gMd, v_gMd = (
        project(served, f"{at}.{name}_proj", x_MW).unflatten(-1, (-1, read.head)).transpose(0, 1)
        for name in "qkv"
    )
    if read.head_norms:
        q_hMd = rms(served, f"{at}.q_norm", q_hMd)
        k_gMd = rms(served, f"{at}.k_norm", k_gMd)
    return rotate(q_hMd, positions_M, read.rope), rotate(k_gMd, positions_M, read.rope), v_gMd


def attention(
    served: ServedDrafter,
    i: int,
    x_MW: Tensor,
    positions_M: Tensor,
    past: Past,
    whole: bool = False,
) -> Tensor:
    """Return layer ``i``'s attention, (M, H), and add the new keys to ``past``.

    Args:
        whole: whether nodes see later ones too.
    """
    read = served.settings
    at = f"layers.{i}.self_attn"
    make_heads = latent_heads if read.latent else heads
    q_hMd, k_gMd, v_gMd = make_heads(served, at, x_MW, positions_M)
    if i in past:
        k_gMd = torch.cat([past[i][0], k_gMd], 1)
        v_gMd = torch.cat([past[i][1], v_gMd], 1)
    past[i] = (k_gMd, v_gMd)
    back_MS = positions_M[:, None] - torch.arange(k_gMd.shape[1], device=positions_M.device)
    window = read.windows[i]
    seen_MS = (back_MS >= 0) | whole
    if window is not None:
        seen_MS = seen_MS & (back_MS < window)
    mixed_1hMd = F.scaled_dot_product_attention(
        q_hMd[None], k_gMd[None], v_gMd[None], seen_MS, enable_gqa=True
    )
    return project(served, f"{at}.o_proj", mixed_1hMd[0].transpose(0, 1).flatten(1))


def latent_heads(
    served: ServedDrafter, at: str, x_MW: Tensor, positions_M: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of DeepSeek's attention (https://arxiv.org/abs/2405.04434), (h, M, width) each.

    Positions rotate neighbors, 2j and 2j + 1, not channels that lie half a head apart.
    """
    read = served.settings
    _, kv_rank, plain, turned, values = read.latent
    latent = rms(served, f"{at}.q_a_layernorm", project(served, f"{at}.q_a_proj", x_MW))
    q_hMd = project(served, f"{at}.q_b_proj", latent)
    q_hMd = q_hMd.unflatten(-1, (-1, plain + turned)).transpose(0, 1)
    latent, shared = project(served, f"{at}.kv_a_proj_with_mqa", x_MW).split([kv_rank, turned], -1)
    kv_hMd = project(served, f"{at}.kv_b_proj", rms(served, f"{at}.kv_a_layernorm", latent))
    kv_hMd = kv_hMd.unflatten(-1, (-1, plain + values)).transpose(0, 1)
    cos_Mr, sin_Mr = _turns(positions_M, read.rope, x_MW.dtype)

    def turn(x_nMr: Tensor) -> Tensor:
        even = x_nMr[..., 0::2]
        odd = x_nMr[..., 1::2]
        pairs = [even * cos_Mr - odd * sin_Mr, odd * cos_Mr + even * sin_Mr]
        return torch.stack(pairs, -1).flatten(-2)

    q_hMd = torch.cat([q_hMd[..., :plain], turn(q_hMd[..., plain:])], -1)
    k_hMd = torch.cat([kv_hMd[..., :plain], turn(shared[None]).expand(len(q_hMd), -1, -1)], -1)
    return q_hMd * read.stretch, k_hMd, kv_hMd[..., plain:]


def rotate(x_nMd: Tensor, positions_M: Tensor, rope: tuple[Tensor, float]) -> Tensor:
    """Rotate channels j and j + r/2 together; the table is made in float32 and used in the dtype of ``x``."""
    cos_Mr, sin_Mr = _turns(positions_M, rope, x_nMd.dtype)
    half = cos_Mr.shape[1]
    first, second, rest = x_nMd.tensor_split((half, 2 * half), -1)
    return torch.cat([first * cos_Mr - second * sin_Mr, second * cos_Mr + first * sin_Mr, rest], -1)


def _turns(
    positions_M: Tensor, rope: tuple[Tensor, float], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles, half as wide as what is rotated."""
    inverse, factor = rope
    angles_Mr = positions_M.float()[:, None] * inverse.to(positions_M.device)
    return (angles_Mr.cos() * factor).to(dtype), (angles_Mr.sin() * factor).to(dtype)


def feed_forward(served: ServedDrafter, i: int, x_MH: Tensor) -> Tensor:
    """Return layer ``i``'s MLP, gated by SiLU, behind its norm."""
    at = f"layers.{i}.mlp"
    x_MH = rms(served, f"layers.{i}.post_attention_layernorm", x_MH)
    return project(
        served,
        f"{at}.down_proj",
        F.silu(project(served, f"{at}.gate_proj", x_MH)) * project(served, f"{at}.up_proj", x_MH),
    )
