"""One step of a drafter, in the engine's two forms: method ``eagle`` is EAGLE-1 and 2, ``eagle3`` EAGLE-3 and 3.1.

Legend: M nodes, N states of the target, H width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.parity.reference.checkpoint import Served
from specdec.parity.reference.layers import Past, attention, feed_forward, further, project, rms


class Out(NamedTuple):
    """What a step leaves for every node, (M, H) each."""

    feedback_MH: Tensor  # the next step's feature
    seen_MH: Tensor  # what the head multiplies


def fuse(served: Served, states: list[Tensor]) -> Tensor:
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


def step(served: Served, tokens_M: Tensor, features_MH: Tensor, positions_M: Tensor, past: Past) -> Out:
    """M nodes, each a token and the feature of the place before it, at the feature's position."""
    embedded_MH = served.weights["embed_tokens.weight"][tokens_M]
    form = _eagle if served.settings.method == "eagle" else _eagle3
    return form(served, embedded_MH, features_MH, positions_M, past)


def _eagle(served: Served, embedded_MH: Tensor, features_MH: Tensor, positions_M: Tensor, past: Past) -> Out:
    """https://arxiv.org/abs/2401.15077: no norm on the way in, none on the way out."""
    x_MH = project(served, "fc", torch.cat([embedded_MH, features_MH], -1))
    h_MH = x_MH + attention(served, 0, x_MH, positions_M, past)
    h_MH = further(served, h_MH + feed_forward(served, 0, h_MH), positions_M, past)
    return Out(h_MH, h_MH)


def _eagle3(served: Served, embedded_MH: Tensor, features_MH: Tensor, positions_M: Tensor, past: Past) -> Out:
    """https://arxiv.org/abs/2503.01840; ``norm_output`` is EAGLE-3.1's (https://arxiv.org/abs/2605.09992)."""
    read = served.settings
    hidden_MH = rms(served, "layers.0.hidden_norm", features_MH)
    beside_MW = torch.cat([rms(served, "layers.0.input_layernorm", embedded_MH), hidden_MH], -1)
    start_MH = hidden_MH if read.norm_before_residual else features_MH
    h_MH = start_MH + attention(served, 0, beside_MW, positions_M, past)
    h_MH = further(served, h_MH + feed_forward(served, 0, h_MH), positions_M, past)
    normed_MH = rms(served, "norm", h_MH)
    return Out(normed_MH if read.norm_output else h_MH, normed_MH)
