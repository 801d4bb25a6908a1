"""Drafters whose proposals depend on everything that a checkpoint says: made for any target in seconds, not trained.

A trained drafter may look at little but the last token, and then no window, rope or boundary that an engine reads
wrongly can show in what it proposes. In a loud one attention has strong preferences and outweighs the residual path,
every norm has uneven weights, states are so small that the norms' epsilon counts, and the draft vocabulary has holes.

Legend: T tokens, N boundaries, H hidden, D draft vocabulary, V target vocabulary.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec.drafter import Drafter, DrafterSpec, TargetLayer
from specdec.drafter.entry import InjectionEntry, NarrowEntry, WideEntry
from specdec.drafting import MarkovHead
from specdec.nn.layers import Attention, RMSNorm, SwiGLU
from specdec.nn.rope import rope_parameters
from specdec.nn.view import View
from specdec.target import Target
from specdec.training.building import config_for

SAMPLE = 64  # tokens of the random text by which states are brought to one size
UNEVEN = 0.5  # standard deviation of the logarithm of a norm's weights
QUERIES_KEYS = 1.6  # standard deviation of their entries, for scores of 2.6
# size of a fused feature, and so of a residual path that begins there: its square is near usual epsilons
SMALL = 0.01
ATTENTION = 2.0  # what it adds to the residual path, as a multiple of that path
# the same, as its down projection is drawn: two products of random states are small
FEED_FORWARD = 4.0
# Without a norm, states grow step by step, and rounding errors with them.
QUIETER = 0.5  # of ATTENTION and FEED_FORWARD, in such a design
CALMER = 0.8  # of the scores' size, in such a design
LOGITS = 3.0  # standard deviation
EAGLE3_DEPTH = 7  # layers from which EAGLE-3's usual boundaries exist


def check_design(name: str) -> DrafterSpec:
    """A shipped design by name, or that of a YAML file; ValueError if there is none, or no random drafter of it."""
    is_file = Path(name).suffix in (".yaml", ".yml")
    spec = DrafterSpec.read(name) if is_file else DrafterSpec.preset(name)
    if isinstance(spec.attention, TargetLayer):
        raise ValueError(
            f"--design {name}: such a drafter (MTP) reuses the target's own layer, so no random one can be made: "
            "import the module and use --drafter"
        )
    return spec


def loud_spec(target: Target, name: str) -> DrafterSpec:
    """A shipped design by name, as it can be made for this target: with holes in its draft vocabulary, boundaries that
    a shallow target has, and a rope where the target has none.

    Raises:
        ValueError: there is no design of this name, or it is a target's own module (MTP).
    """
    spec = check_design(name)
    if spec.head == "own":
        size = max(1, 2 * target.vocab_size // 3)
        chosen = size if spec.draft_vocab_size == "all" else min(size, spec.draft_vocab_size)
        spec = replace(spec, draft_vocab_size=chosen)
    if spec.fusion.mixes and spec.aux_layers == "default" and target.num_layers < EAGLE3_DEPTH:
        middle = {1, target.num_layers // 2, target.num_layers - 1} - {0}
        spec = replace(spec, aux_layers=sorted(middle))
    try:
        rope_parameters(target.config)
    except ValueError:
        spec = replace(spec, rope_theta=10000.0)
    return spec


@torch.no_grad()
def loud_drafter(target: Target, spec: DrafterSpec, seed: int = 0) -> Drafter:
    """A drafter of this design for a target, in the target's dtype and on its device.

    The token embedding is the target's where widths agree, and the head where the design has the target's.

    Raises:
        ValueError: design and target do not go together.
    """
    config = config_for(spec, target)
    generator = torch.Generator().manual_seed(seed)
    order_V = torch.randperm(config.vocab_size, generator=generator)
    ids_D = order_V[: config.draft_vocab_size].sort().values
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config, ids_D).to(target.device, target.dtype)
    if config.hidden_size == config.target_hidden_size:
        drafter.embed_tokens.weight.copy_(target.embedding_weight())
    if config.head == "target":
        drafter.lm_head.weight.copy_(target.head_weight())
    else:
        _draw(drafter.lm_head.weight, LOGITS / math.sqrt(config.hidden_size), generator)
    feature_size = _level_features(drafter, target, generator)
    # no norm before the attention
    raw = isinstance(drafter.entry, NarrowEntry) and not config.norms.input
    entered = feature_size / CALMER if raw else 1.0
    # the size of the states on the residual path, and so of what a chained step hands to the next
    path = 1.0 if config.norms.residual == "normed" else feature_size
    if isinstance(drafter.entry, InjectionEntry):  # it starts from embeddings
        path = _size(drafter.embed_tokens.weight)
    if raw:
        path *= QUIETER
    for module in drafter.modules():
        _make_loud(module, path, generator)
    first: Any = drafter.layers.layers[0]
    first.attention.qkv_proj.weight.div_(entered)
    return drafter.eval().requires_grad_(False)


def _make_loud(module: nn.Module, path: float, generator: torch.Generator) -> None:
    """Give one module's weights the size that its part needs next to a residual path of size ``path``."""
    if isinstance(module, RMSNorm):
        _draw(module.weight, UNEVEN, generator)
        module.weight.exp_()
    elif isinstance(module, WideEntry):  # half of what queries, keys and values are made of
        _fill(module.token_qkv_proj, QUERIES_KEYS / math.sqrt(2), generator)
    elif isinstance(module, Attention):
        for projection in (part for part in module.children() if isinstance(part, nn.Linear)):
            _fill(projection, QUERIES_KEYS, generator, UNEVEN)
        _fill(module.o_proj, path * ATTENTION, generator, path * UNEVEN)
    elif isinstance(module, SwiGLU):
        _fill(module.gate_up_proj, 1, generator)
        _fill(module.down_proj, path * FEED_FORWARD, generator)
    elif isinstance(module, MarkovHead):
        # The token before a draft decides as much as the states do.
        _draw(module.previous.weight, 1, generator)
        _fill(module.transition, LOGITS, generator)
        if module.confidence is not None:
            _fill(module.confidence, 1, generator, 1)


def _level_features(drafter: Drafter, target: Target, generator: torch.Generator) -> float:
    """Bring fused features to :data:`SMALL` size on a random text; the size that they have, fused or not."""
    config = drafter.config
    ids_1T = torch.randint(
        config.vocab_size,
        (1, min(SAMPLE, target.config.max_position_embeddings)),
        generator=generator,
    ).to(target.device)
    aux_1TNH = target.forward(
        ids_1T, View.packed(torch.zeros_like(ids_1T)), config.aux_layers, config.fusion.final_norm
    ).aux_BTNH
    learned = config.drafting.learned_states(drafter)
    if learned is not None:
        _draw(learned, _size(aux_1TNH), generator)
    fc = getattr(drafter.fusion, "fc", None)
    if isinstance(fc, nn.Linear):
        _draw(fc.weight, 1.0, generator)
        fc.weight.mul_(SMALL / _size(drafter.fuse(aux_1TNH)))
    feature_1TH = drafter.fuse(aux_1TNH)
    if isinstance(drafter.entry, NarrowEntry):  # embedding and feature have half of its output each
        read_1TH = drafter.norms.embed(drafter.embed_tokens(ids_1T))
        halves = {
            drafter.entry.token_fc: read_1TH,
            drafter.entry.feature_fc: drafter.norms.hidden(feature_1TH),
        }
        for half, x_1TH in halves.items():
            _draw(half.weight, 1.0, generator)
            half.weight.mul_(
                _size(feature_1TH) / _size(nn.functional.linear(x_1TH, half.weight)) / math.sqrt(2)
            )
    return _size(feature_1TH)


def _fill(linear: nn.Linear, size: float, generator: torch.Generator, bias: float = 0) -> None:
    """Give a matrix entries with which inputs of size 1 become outputs of this size, and a bias of another."""
    _draw(linear.weight, size / math.sqrt(linear.in_features), generator)
    if linear.bias is not None:
        _draw(linear.bias, bias, generator)


def _size(x: Tensor) -> float:
    """Root mean square of all entries, at least a tiny one."""
    return max(float(x.double().square().mean().sqrt()), 1e-12)


def _draw(weight: Tensor, deviation: float, generator: torch.Generator) -> None:
    """Fill a tensor with normal numbers that do not depend on its device."""
    numbers = torch.randn(weight.shape, generator=generator, dtype=torch.float32) * deviation
    weight.copy_(numbers.to(weight))
