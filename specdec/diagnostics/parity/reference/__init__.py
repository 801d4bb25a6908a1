"""What vLLM 0.32.0 does with a drafter's directory, in plain torch, after its documented semantics.

Written apart from the drafter: of this package nothing but this folder is imported here, and the checkpoint is read by
its own tensors' names. So it can say that a checkpoint is not the drafter that it was made of. Method ``eagle`` is
EAGLE-1 and 2, ``eagle3`` EAGLE-3 and 3.1.

Legend: T tokens, A anchors, K depths, M new nodes, S keys, H width, W input width, h query heads, g key heads, n heads,
d head width, r rotated width, V target vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.diagnostics.parity.reference.checkpoint import EMBEDDING, Misread, Rotary, ServedDrafter, load

__all__ = ["Misread", "ServedDrafter", "draft", "fuse", "load"]

Past = list[tuple[Tensor, Tensor]]
"""Keys and values of every layer, (g, S, d) each; column j stands at position j."""


def draft(
    served: ServedDrafter, ids_T: Tensor, features_TH: Tensor, anchors: Sequence[int], depth: int
) -> tuple[Tensor, Tensor]:
    """What is read and said at every anchor and depth: the text once over its features, then a chain from each anchor.

    An anchor is a place whose feature is the target's own; at depth k its chain has read the text's next k tokens
    instead of drafts of its own. A chain's keys go when it ends.

    Returns:
        Features read (A, K, H), and log-probabilities (A, K, V) of the token after next, -inf where the drafter has
        no such token.
    """
    empty = features_TH.new_empty(served.settings.groups, 0, served.settings.head)
    past = [(empty, empty)] * served.settings.layers
    places_T = torch.arange(len(ids_T), device=ids_T.device)
    feedback_TH, hidden_TH = step(served, ids_T[1:], features_TH[:-1], places_T[:-1], past)
    read, said = [], []
    for anchor in anchors:
        own = [(k_gSd[:, : anchor + 1], v_gSd[:, : anchor + 1]) for k_gSd, v_gSd in past]
        feature_1H = feedback_TH[anchor : anchor + 1]
        read.append(features_TH[anchor])
        said.append(_log_probs(served, hidden_TH[anchor]))
        for at in range(anchor + 1, anchor + depth + 1):
            read.append(feature_1H[0])
            feature_1H, hidden_1H = step(served, ids_T[at + 1 : at + 2], feature_1H, places_T[at : at + 1], own)
            said.append(_log_probs(served, hidden_1H[0]))
    shape = (len(anchors), depth + 1)
    return torch.stack(read).unflatten(0, shape), torch.stack(said).unflatten(0, shape)


def _log_probs(served: ServedDrafter, hidden_H: Tensor) -> Tensor:
    """(V,), float32 at least."""
    logits_D = project(served, "lm_head", hidden_H) * served.settings.logit_scale
    log_D = logits_D.log_softmax(-1, dtype=torch.promote_types(logits_D.dtype, torch.float32))
    return log_D.new_full((served.settings.vocab,), float("-inf")).index_copy(0, served.target_ids_D, log_D)


def fuse(served: ServedDrafter, states: list[Tensor]) -> Tensor:
    """The feature (M, H) out of the target's states, each (M, H of the target); only once, not of what is fed back."""
    read = served.settings
    if read.method == "eagle":
        (final_MH,) = states
        return final_MH
    joined = torch.cat(states, -1)
    if read.norm_before_fc:
        joined = rms(served, "input_norm", joined)
    if read.fc_norm:
        chunks = joined.chunk(len(states), -1)
        joined = torch.cat([rms(served, f"fc_norm.{n}", chunk) for n, chunk in enumerate(chunks)], -1)
    return project(served, "fc", joined)


def step(
    served: ServedDrafter, tokens_M: Tensor, features_MH: Tensor, positions_M: Tensor, past: Past
) -> tuple[Tensor, Tensor]:
    """M nodes, each a token and the feature of the place before it, at the feature's position.

    They see each other causally, and whatever was kept before them.

    Returns:
        The next step's features (M, H), and what the head multiplies (M, H).
    """
    read, embedded_MH = served.settings, served.weights[EMBEDDING][tokens_M]
    if read.method == "eagle":  # https://arxiv.org/abs/2401.15077: no norm on the way in, none on the way out
        start_MH = beside_MW = project(served, "fc", torch.cat([embedded_MH, features_MH], -1))
    else:  # https://arxiv.org/abs/2503.01840
        hidden_MH = rms(served, "layers.0.hidden_norm", features_MH)
        beside_MW = torch.cat([rms(served, "layers.0.input_layernorm", embedded_MH), hidden_MH], -1)
        start_MH = hidden_MH if read.norm_before_residual else features_MH
    h_MH = start_MH + attention(served, 0, beside_MW, positions_M, past)
    h_MH = h_MH + feed_forward(served, 0, h_MH)
    for i in range(1, read.layers):  # plain layers, each normalised on its way in
        h_MH = h_MH + attention(served, i, rms(served, f"layers.{i}.input_layernorm", h_MH), positions_M, past)
        h_MH = h_MH + feed_forward(served, i, h_MH)
    if read.method == "eagle":
        return h_MH, h_MH
    normed_MH = rms(served, "norm", h_MH)
    return normed_MH if read.norm_output else h_MH, normed_MH  # EAGLE-3.1: https://arxiv.org/abs/2605.09992


def rms(served: ServedDrafter, name: str, x: Tensor) -> Tensor:
    """Unit root mean square over the last axis, in float32 at least, times the weight."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = wide / (wide.square().mean(-1, keepdim=True) + served.settings.eps).sqrt()
    return unit.to(x.dtype) * served.weights[f"{name}.weight"]


def project(served: ServedDrafter, name: str, x: Tensor) -> Tensor:
    """A matrix, and its bias if there is one."""
    return F.linear(x, served.weights[f"{name}.weight"], served.weights.get(f"{name}.bias"))


def attention(served: ServedDrafter, i: int, x_MW: Tensor, positions_M: Tensor, past: Past) -> Tensor:
    """Layer ``i``'s attention, (M, H); the new keys are added to ``past``."""
    read, at = served.settings, f"layers.{i}.self_attn"
    q_hMd, k_gMd, v_gMd = (
        project(served, f"{at}.{name}_proj", x_MW).unflatten(-1, (-1, read.head)).transpose(0, 1) for name in "qkv"
    )
    if read.head_norms:
        q_hMd, k_gMd = rms(served, f"{at}.q_norm", q_hMd), rms(served, f"{at}.k_norm", k_gMd)
    q_hMd, k_gMd = (rotate(x, positions_M, read.rope) for x in (q_hMd, k_gMd))
    past[i] = torch.cat([past[i][0], k_gMd], 1), torch.cat([past[i][1], v_gMd], 1)
    k_hSd, v_hSd = (x.repeat_interleave(read.heads // read.groups, 0) for x in past[i])
    back_MS = positions_M[:, None] - torch.arange(k_hSd.shape[1], device=positions_M.device)
    window = read.windows[i]
    hidden_MS = (back_MS < 0) if window is None else (back_MS < 0) | (back_MS >= window)
    scores_hMS = (q_hMd @ k_hSd.mT / read.head**0.5).masked_fill(hidden_MS, float("-inf"))
    shares_hMS = scores_hMS.softmax(-1, dtype=torch.promote_types(scores_hMS.dtype, torch.float32))
    return project(served, f"{at}.o_proj", (shares_hMS.to(v_hSd.dtype) @ v_hSd).transpose(0, 1).flatten(1))


def rotate(x_nMd: Tensor, positions_M: Tensor, rope: Rotary) -> Tensor:
    """Channel j and channel j + r/2 turn together; the table is made in float32 and used in the dtype of ``x``."""
    angles_Mr = (positions_M.float()[:, None] * rope.inverse.to(positions_M.device)).repeat(1, 2)
    cos_Mr, sin_Mr = ((f(angles_Mr) * rope.factor).to(x_nMd.dtype) for f in (torch.cos, torch.sin))
    r = angles_Mr.shape[1]
    one, two = x_nMd[..., : r // 2], x_nMd[..., r // 2 : r]
    turned = x_nMd[..., :r] * cos_Mr + torch.cat([-two, one], -1) * sin_Mr
    return torch.cat([turned, x_nMd[..., r:]], -1)


def feed_forward(served: ServedDrafter, i: int, x_MH: Tensor) -> Tensor:
    """Layer ``i``'s, gated by SiLU, behind its norm."""
    at = f"layers.{i}.mlp"
    x_MH = rms(served, f"layers.{i}.post_attention_layernorm", x_MH)
    gate = F.silu(project(served, f"{at}.gate_proj", x_MH))
    return project(served, f"{at}.down_proj", gate * project(served, f"{at}.up_proj", x_MH))
