"""The drafter: the module that training and decoding run and export writes, its decoder layers, its draft vocabulary.

Legend: B batch, T nodes, N aux layers, H hidden, D draft vocabulary, V target vocabulary, W queries, keys and
values.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from specdec.drafter.config import DrafterConfig
from specdec.drafter.entry import Entered, EntryModule
from specdec.drafter.norms import NormTable
from specdec.drafter.vocab import DraftVocab
from specdec.drafting.mode import Step, UnrollTask
from specdec.drafting.parallel import FeedMask
from specdec.drafting.slots import KeptSlots
from specdec.nn.layers import Attention, RMSNorm, SwiGLU
from specdec.nn.parts import build_part
from specdec.nn.rope import Rope
from specdec.nn.unroll import DENSE, UnrollKernel
from specdec.nn.view import View
from specdec.utils.text import how_many


class Layer(nn.Module):
    """Attention and feed-forward around a residual path; the attention's input comes ready from outside."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        self.attention = config.attention.build_layer(config, index)
        if not isinstance(self.attention, Attention):
            name = type(config.attention).__name__
            raise ValueError(
                f"attention {name}: its build_layer returned no specdec.nn.layers.Attention"
            )
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, entered: Entered, view: View, rope: tuple[Tensor, Tensor]) -> Tensor:
        """The residual stream after the layer, (B, T, H), or of the nodes that the view asks for."""
        residual_BTH = entered.residual_BTH
        if view.wanted_BM is not None:
            residual_BTH = residual_BTH.take_along_dim(view.wanted_BM[..., None], dim=1)
        middle_BTH = residual_BTH + self.attention(
            entered.attn_input_BTH, view, rope, entered.qkv_bias_BTW, entered.context_BCH
        )
        return middle_BTH + self.mlp(self.post_attention_norm(middle_BTH))


class Layers(nn.Module):
    """The first layer reads what the entry made; each further one is a plain pre-norm layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        build = config.attention.build_decoder
        self.layers = nn.ModuleList(
            build(config) or Layer(config, index) for index in range(config.num_layers)
        )
        further = range(1, config.num_layers)
        self.input_norms = nn.ModuleList(
            RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in further
        )
        self.rope = Rope(
            config.rope, config.attention.rotated(config), config.max_position_embeddings
        )
        self.set_window(config)

    def set_window(self, config: DrafterConfig) -> None:
        """Let every node attend as far back, and to as many sinks, as a config says."""
        self.window = None if config.attention_window == "full" else config.attention_window
        self.sinks = config.attention_sinks

    def forward(self, entered: Entered, view: View) -> Tensor:
        """The last layer's residual stream, (B, T, H), or of the nodes that the view asks for."""
        rope = self.rope.tables(view.positions_BT)
        if self.window is not None:
            view = view.within(self.window, self.sinks)
        views = [view._replace(wanted_BM=None)] * (len(self.layers) - 1) + [view]
        out_BTH: Tensor = self.layers[0](entered, views[0], rope)
        for norm, layer, seen in zip(self.input_norms, self.layers[1:], views[1:], strict=True):
            out_BTH = layer(Entered(norm(out_BTH), None, out_BTH), seen, rope)
        return out_BTH


class ContextLayers(Layers):
    """Layers whose keys and values are made of context nodes too, each layer's of the same features (DFlash,
    https://arxiv.org/abs/2602.06036); these have no queries and pass through no layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.input_norms.insert(0, RMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(self, entered: Entered, view: View) -> Tensor:
        """The last layer's residual stream at the T drafted nodes, (B, T, H); the view's positions and slots are those
        of C context nodes and then these."""
        rope = self.rope.tables(view.positions_BT)
        x_BTH = entered.residual_BTH
        for norm, layer in zip(self.input_norms, self.layers, strict=True):
            x_BTH = layer(Entered(norm(x_BTH), None, x_BTH, entered.context_BCH), view, rope)
        return x_BTH


class LogitScale(nn.Module):
    """Multiplies what the head reads, and so its products, by one number."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, normed_BTH: Tensor) -> Tensor:
        return normed_BTH * self.scale


# of a router, among whose experts it decides by small differences
ROUTER_BIAS = "e_score_correction_bias"


class Drafter(nn.Module):
    """An EAGLE drafter: `fuse` once, then `step` after `step`, and `logits`.

    Decoding calls the three; training takes `step` apart into `read`, once for all unroll steps, and `advance`, and
    multiplies by the head's weight piece by piece. The head is a separate call, since it is the widest product.

    Args:
        config: the complete description.
        target_ids_D: int64, the draft vocabulary; see :func:`specdec.drafter.vocab.most_frequent_ids`.
    """

    def __init__(self, config: DrafterConfig, target_ids_D: Tensor) -> None:
        super().__init__()
        if len(target_ids_D) != config.draft_vocab_size:
            raise ValueError(
                f"{how_many(len(target_ids_D), 'draft token')} given, the config says {config.draft_vocab_size}"
            )
        # before any part draws: parts differ in how much they do
        seed = int(torch.randint(2**62, (), device="cpu"))
        self.config = config
        self.vocab = DraftVocab(target_ids_D, config.vocab_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        # every site exists; unused ones are the identity
        self.norms = build_part("norms", config, NormTable)
        self.fusion = build_part("fusion", config, nn.Module)  # (B, T, N, H_target) -> (B, T, H)
        # token, feature -> first layer's input and residual
        self.entry = build_part("entry", config, EntryModule)
        self.layers = (ContextLayers if config.entry.context else Layers)(config)
        self.recurrence = build_part("recurrence", config, nn.Module)  # out, normed -> next feature
        if isinstance(self.recurrence, FeedMask):
            self.recurrence.fuse = self.fuse
        self.logit_scale = (
            nn.Identity() if config.logit_scale == 1 else LogitScale(config.logit_scale)
        )
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.is_meta:
                # by module's name and seed: drafters of two designs begin alike in all that they share
                key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8])
                generator = torch.Generator().manual_seed(key)
                weight = module.weight.data
                drawn = weight if weight.is_cpu else torch.empty_like(weight, device="cpu")
                weight.copy_(drawn.normal_(0, 0.02, generator=generator))
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            # built in 16 bits
            if hasattr(module, ROUTER_BIAS) and (bias := getattr(module, ROUTER_BIAS)).itemsize < 4:
                setattr(module, ROUTER_BIAS, bias.float())

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast the module; :data:`ROUTER_BIAS` is not rounded, as transformers does not round it."""
        biases = [
            (module, getattr(module, ROUTER_BIAS))
            for module in self.modules()
            if hasattr(module, ROUTER_BIAS)
        ]
        super().to(*args, **kwargs)
        for module, value in biases:
            if (now := getattr(module, ROUTER_BIAS)).itemsize < value.itemsize:
                setattr(module, ROUTER_BIAS, value.to(now.device))
        return self

    def set_window(self, window: int | Literal["full"] | None, sinks: int | None) -> None:
        """Replace the attention window and sinks, in place; the weights stay.

        Args:
            window: as of :meth:`DrafterConfig.with_window`, and ``sinks`` too.

        Raises:
            ValueError: the drafter cannot have them; see there.
        """
        self.config = self.config.with_window(window, sinks)
        self.layers.set_window(self.config)

    def fuse(self, aux_BTNH: Tensor) -> Tensor:
        """The target's states at ``config.aux_layers``, (B, T, N, H_target), as features (B, T, H)."""
        return self.fusion(self.norms.aux(aux_BTNH))

    def read(self, ids_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what the first layer needs of the tokens alone, (B, T, anything).

        Args:
            dtype: the features'; under autocast the embedding table is wider.
        """
        return self.entry.read(self.norms.embed(self.embed_tokens(ids_BT).to(dtype)))

    def step(self, ids_BT: Tensor, h_BTH: Tensor, view: View) -> Step:
        """Advance every node by one token.

        Args:
            ids_BT: int64 target ids: node t holds the token that follows its feature.
            h_BTH: features, from :meth:`fuse` or from the step before. Of an entry that takes them as context they are
                those of C nodes before the T, (B, C, H).
            view: whom each node sees.
        """
        return self.advance(self.read(ids_BT, h_BTH.dtype), h_BTH, view)

    def advance(self, read: Tensor, h_BTH: Tensor, view: View) -> Step:
        """:meth:`step` with tokens that were read before: training reads each once and shifts it from step to step."""
        entered = self.entry(read, self.norms.hidden(h_BTH), h_BTH, self.norms)
        out_BTH = self.layers(entered, view)
        normed_BTH = self.norms.output(out_BTH)
        return Step(self.recurrence(out_BTH, normed_BTH), self.logit_scale(normed_BTH))

    def unroll(
        self,
        ids_BT: Tensor,
        aux_BTNH: Tensor,
        documents_BT: Tensor,
        steps: int,
        kernel: UnrollKernel = DENSE,
        recompute: bool = False,
        kept: Sequence[KeptSlots | None] = (),
    ) -> Iterator[Step]:
        """Yield steps 0 to ``steps - 1`` at every anchor of a batch at once, as training needs them.

        Args:
            ids_BT: int64 token ids.
            aux_BTNH: the target's states at the drafter's boundaries.
            documents_BT: int64 document numbers, -1 for padding.
            kernel: how attention is computed; all kernels give the same numbers.
            recompute: keep only each step's inputs and outputs for the backward pass, and run the step again there.
            kept: for each step, the slots whose states are wanted, among those of the step before; the step's states
                are (B, M, H) then. None, or no list at all, for all slots.
        """
        task = UnrollTask(ids_BT, aux_BTNH, documents_BT, steps, kernel, recompute, kept)
        return self.config.drafting.unroll(self, task)

    def logits(self, normed: Tensor) -> Tensor:
        """Draft logits (..., D) of what the head reads (``Step.normed_BTH``); index j is the target id
        ``vocab.target_ids_D[j]``."""
        return self.config.drafting.logits(self, normed)

    @torch.no_grad()
    def warm_start(self, embedding_VH: Tensor, head_VH: Tensor) -> None:
        """Start embedding and head from the target's; where the widths differ they stay random.

        The output norm does not start as the target's. A state that is still random would have logits far apart under
        it (a standard deviation of 53 on a Gemma-3, whose norm has weights of 26 on average), and a norm of uneven
        weights, fed back, is applied once more at every step. It starts at one number of three digits, for which a
        random state has logits of a standard deviation of about one, or less.
        """
        if embedding_VH.shape[1] != self.config.hidden_size:
            return
        self.embed_tokens.weight.copy_(embedding_VH)
        self.lm_head.weight.copy_(head_VH[self.vocab.target_ids_D.to(head_VH.device)])
        if isinstance(self.norms.output, RMSNorm):
            # of a unit-RMS state's logits
            variance = self.lm_head.weight.float().var(0, correction=0).sum()
            deviation = self.config.logit_scale * float(variance.sqrt())
            self.norms.output.weight.fill_(float(f"{1 / max(1.0, deviation):.3g}"))


def skeleton_of(config: DrafterConfig) -> Drafter:
    """The drafter on the meta device: names, shapes and dtypes, and no memory; nothing is drawn for it."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return Drafter(config, torch.arange(config.draft_vocab_size, device="cpu"))
