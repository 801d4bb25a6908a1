"""The drafter: its decoder layers, and the module that training, decoding and export call.

Legend: B batch, T nodes, N aux layers, H hidden, D draft vocabulary.
"""

import hashlib
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from specdec.drafter.config import DrafterConfig
from specdec.drafter.entry import Entered, EntryModule
from specdec.drafter.norms import NormTable
from specdec.drafter.vocab import DraftVocab
from specdec.nn.layers import Attention, RMSNorm, SwiGLU
from specdec.nn.rope import Rope
from specdec.nn.view import View
from specdec.utils.config_diff import class_name

Built = TypeVar("Built", bound=nn.Module)


class Layer(nn.Module):
    """Attention and feed-forward around a residual path; the attention's input comes ready from outside."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        norm = config.norms.build_heads(config)
        self.attention = Attention(config.hidden_size, heads, kv_heads, config.head_dim, index, norm)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, entered: Entered, view: View, rope: tuple[Tensor, Tensor]) -> Tensor:
        """The residual stream after the layer, (B, T, H), or of the nodes that the view asks for."""
        middle_BTH = view.wanted(entered.residual_BTH) + self.attention(
            entered.block_BTH, view, rope, entered.beside_BTW
        )
        return middle_BTH + self.mlp(self.post_attention_norm(middle_BTH))


class Layers(nn.Module):
    """The first layer reads what the entry made; each further one is a plain pre-norm layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        further = range(1, config.num_layers)
        self.input_norms = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in further)
        self.rope = Rope(config.rope, config.head_dim, config.max_position_embeddings)
        self.window = None if config.attention_window == "full" else config.attention_window

    def forward(self, entered: Entered, view: View) -> Tensor:
        """The last layer's residual stream, (B, T, H), or of the nodes that the view asks for."""
        rope = self.rope.tables(view.positions_BT)
        if self.window is not None:
            view = view.within(self.window)
        views = [view._replace(wanted_BM=None)] * (len(self.layers) - 1) + [view]
        out_BTH: Tensor = self.layers[0](entered, views[0], rope)
        for norm, layer, seen in zip(self.input_norms, self.layers[1:], views[1:], strict=True):
            out_BTH = layer(Entered(norm(out_BTH), None, out_BTH), seen, rope)
        return out_BTH


class Step(NamedTuple):
    """What one step of the drafter yields for every node."""

    h_BTH: Tensor  # the feature handed to the next step
    normed_BTH: Tensor  # what the head reads: `Drafter.logits(normed)`


def built(axis: str, config: Any, kind: type[Built]) -> Built:
    """The module of one of a config's axes.

    Raises:
        ValueError: it builds something else.
    """
    part = getattr(config, axis)
    module = part.build(config)
    if not isinstance(module, kind):
        made = "None" if module is None else f"a {type(module).__name__}"
        wanted = f"{kind.__module__}.{kind.__qualname__}"
        raise ValueError(f"{axis} {class_name(type(part))}: its build returned {made}, wanted an instance of {wanted}")
    return module


@torch.no_grad()
def draw(weight: Tensor, seed: int, name: str) -> None:
    """Normal weights, by their module's name and a seed: drafters of two designs begin alike in all that they share."""
    if weight.is_meta:  # it has a shape and nothing else
        return
    keyed = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8])
    generator = torch.Generator().manual_seed(keyed)
    weight.copy_(torch.empty(weight.shape, dtype=weight.dtype, device="cpu").normal_(0, 0.02, generator=generator))


class Drafter(nn.Module):
    """An EAGLE drafter. Training, decoding and export call `fuse`, `step` and `logits`, and nothing else.

    The head is a call of its own, since it is the widest product: training calls it for supervised rows,
    decoding for the frontier.

    Args:
        config: the complete description.
        target_ids_D: int64, the draft vocabulary; see :func:`specdec.drafter.vocab.choose`.
    """

    def __init__(self, config: DrafterConfig, target_ids_D: Tensor) -> None:
        super().__init__()
        if len(target_ids_D) != config.draft_vocab_size:
            raise ValueError(f"{len(target_ids_D)} draft tokens given, the config says {config.draft_vocab_size}")
        seed = int(torch.randint(2**62, (), device="cpu"))  # before any part draws: parts differ in how much they do
        self.config = config
        self.vocab = DraftVocab(target_ids_D, config.vocab_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norms = built("norms", config, NormTable)  # every site exists; unused ones are the identity
        self.fusion = built("fusion", config, nn.Module)  # (B, T, N, H_target) -> (B, T, H)
        self.entry = built("entry", config, EntryModule)  # token, feature -> first layer's input and residual
        self.layers = Layers(config)
        self.recurrence = built("recurrence", config, nn.Module)  # out, normed -> next feature
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                draw(module.weight, seed, name)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def fuse(self, aux_BTNH: Tensor) -> Tensor:
        """The target's states at ``config.aux_layers``, (B, T, N, H_target), as features (B, T, H)."""
        return self.fusion(self.norms.aux(aux_BTNH))

    def read(self, ids_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """What the first layer needs of the tokens alone, (B, T, anything).

        Args:
            dtype: the features'; under autocast the embedding table is wider.
        """
        return self.entry.read(self.norms.embed(self.embed_tokens(ids_BT).to(dtype)))

    def step(self, ids_BT: Tensor, h_BTH: Tensor, view: View) -> Step:
        """Advance every node by one token.

        Args:
            ids_BT: int64 target ids: node t holds the token that follows its feature.
            h_BTH: features, from :meth:`fuse` or from the step before.
            view: whom each node sees.
        """
        return self.advance(self.read(ids_BT, h_BTH.dtype), h_BTH, view)

    def advance(self, read: Tensor, h_BTH: Tensor, view: View) -> Step:
        """:meth:`step` with tokens that were read before: training reads each once and shifts it from step to step."""
        entered = self.entry(read, self.norms.hidden(h_BTH), h_BTH, self.norms)
        out_BTH = self.layers(entered, view)
        normed_BTH = self.norms.output(out_BTH)
        return Step(self.recurrence(out_BTH, normed_BTH), normed_BTH)

    def logits(self, normed: Tensor) -> Tensor:
        """Draft logits (..., D) of states (..., H); index j is the target id ``vocab.target_ids_D[j]``."""
        return self.lm_head(normed)

    @torch.no_grad()
    def warm_start(self, embedding_VH: Tensor, head_VH: Tensor, norm_scale_H: Tensor) -> None:
        """Start embedding, head and output norm from the target's; where the widths differ they stay random.

        Args:
            norm_scale_H: what the target's final norm multiplies a unit-RMS state by.
        """
        if embedding_VH.shape[1] != self.config.hidden_size:
            return
        self.embed_tokens.weight.copy_(embedding_VH)
        self.lm_head.weight.copy_(head_VH[self.vocab.target_ids_D.to(head_VH.device)])
        if isinstance(self.norms.output, RMSNorm):
            self.norms.output.weight.copy_(norm_scale_H)
