"""The target, the field's "verifier": a frozen Hugging Face model, for features and for verification.

Legend: B batch, T new nodes, N asked boundaries, H hidden, V vocabulary, D some rows of it, S key columns.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.data.tokenizer import tokenizer_digest
from specdec.nn.view import Spans, View
from specdec.target.attention import Mask, Tape, TargetCache, layer_masks, use_own_attention
from specdec.target.files import numbers
from specdec.target.identity import Digests, model_digests, same_target, target_difference, whole_of
from specdec.target.loading import devices_of_layers, named_parts
from specdec.target.model_parts import OURS, OURS_EAGER, model_parts, rope_limit
from specdec.target.proof import prove
from specdec.target.recurrence import Steps
from specdec.target.source import TargetSource
from specdec.utils.trust import redacted

log = logging.getLogger(__name__)


class TargetOutput(NamedTuple):
    """What one forward of the target says."""

    aux_BTNH: Tensor  # residual stream at the asked boundaries, in the order asked
    final_BTH: Tensor  # the last state after the final norm; ``Target.logits`` of it are the model's logits


class Target:
    """A frozen causal language model. Not a ``nn.Module``, so it enters no state dict and is never trained.

    The model is put in evaluation mode and its parameters frozen. It runs in its own dtype, autocast or not: what
    a drafter is trained on is what it meets in decoding. One forward at a time, of all targets that share a model.

    Args:
        model: any decoder-only model of ``transformers`` with full or sliding attention.
        source: where it came from, a directory or a Hub id; kept for :attr:`identity` and for messages, as ``adapter``
            is, which has been merged into the model.
        whole: false if the model's layers are on the meta device: it has logits of final states, and no forward.

    Raises:
        ValueError: the family cannot verify a draft tree, or its parts cannot be found.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        source: str = "in memory",
        revision: str | None = None,
        adapter: str | None = None,
        whole: bool = True,
    ) -> None:
        self.whole = whole
        self._known_as = dict[str, Any]()  # of a target of which only parts are loaded
        self.model = model.eval().requires_grad_(False)
        self.source = source
        self.revision = revision
        self.adapter = adapter
        self.origin: TargetSource | None = None  # that it was loaded from, to load it again
        self._tokenizer = tokenizer
        self._parts = parts = model_parts(model)
        use_own_attention(model)
        self._tape = Tape(parts)
        Steps(parts.mixers)
        self.config = parts.config  # of the text model, Hugging Face's
        self.final_norm = parts.final_norm
        self.num_layers = len(parts.layers)  # L; boundaries run from 0 to L
        self.hidden_size = int(self.config.hidden_size)  # H
        # V, the head's rows; a tokenizer may know fewer tokens
        self.vocab_size = int(parts.head.weight.shape[0])
        # of every layer, whether it attends; else it is recurrent, or has no mixer
        self.attends = parts.attends
        self.recurrent = any(parts.mixers)  # then its drafts are chains
        # decoded side by side where nobody says how many: a recurrent text's states are kept after each of its drafts
        self.most_texts = 8 if self.recurrent else sys.maxsize
        self.most_slots = rope_limit(self.config)  # of a cache; None for any number

    @classmethod
    def load(cls, source: str | Path, device: str = "cpu", **options: Any) -> "Target":
        """Load model and tokenizer; see :class:`TargetSource` for the options."""
        return TargetSource(str(source), **options).load(device)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; ``ValueError`` if the target has none."""
        if self._tokenizer is None:
            raise ValueError(
                f"the target ({self.source}) has no tokenizer: save its tokenizer.json and tokenizer_config.json in "
                "that directory"
            )
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether it brought one."""
        return self._tokenizer is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it runs in."""
        return self.embedding_weight().dtype

    @property
    def device(self) -> torch.device:
        """The device it runs on."""
        return self.embedding_weight().device

    @property
    def routed(self) -> bool:
        """Whether its layers choose among experts."""
        return any(
            name.endswith("experts") and value > 1 for name, value in numbers(self.config.to_dict())
        )

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that ends a text, after the generation config, the model's config and the tokenizer."""
        named = [self.config, self.model.config, self.model.generation_config, self._tokenizer]
        ids: set[int] = set()
        for holder in named:
            value = getattr(holder, "eos_token_id", None)
            ids.update([value] if isinstance(value, int) else value or [])
        return frozenset(ids)

    @property
    def identity(self) -> dict[str, str | int | None]:
        """Which target this is, JSON-ready; see :mod:`specdec.target.identity`."""
        dtype = str(self.dtype).removeprefix("torch.")
        whole = self._digests._asdict() if self.whole else whole_of(self._known_as, dtype)
        return {
            "source": redacted(self.source),
            "revision": redacted(self.revision),
            "model_type": self.config.model_type,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "num_layers": self.num_layers,
            "dtype": dtype,
            **whole,
            "parts": self._digests_of_parts.fingerprint,
            "exact_parts": self._digests_of_parts.exact,
            "tokenizer": self._tokenizer_digest,
            **({} if self.adapter is None else {"adapter": self.adapter}),
        }

    def _check_whole(self) -> None:
        if not self.whole:
            raise ValueError(
                f"{self.source}: target.parts is on, so it has no layers to run: what needs a forward of the target "
                "needs it whole"
            )

    @cached_property
    def _digests(self) -> Digests:
        return model_digests(self.model.config.to_dict(), self.model.state_dict())

    @cached_property
    def _tokenizer_digest(self) -> str | None:
        return None if self._tokenizer is None else tokenizer_digest(self._tokenizer)

    @cached_property
    def _digests_of_parts(self) -> Digests:
        config = {
            name: value
            for name, value in self.model.config.to_dict().items()
            if name != "quantization_config"
        }
        return model_digests(config, dict(named_parts(self.model).values()))

    def is_of(self, identity: Mapping[str, Any]) -> bool:
        """Whether it is the target of that identity."""
        return same_target(self.identity, identity)

    def take_identity(self, identity: Mapping[str, Any]) -> None:
        """Of parts alone: be the whole target of that identity; ValueError if it has other parts."""
        if not self.is_of(identity):
            raise ValueError(
                f"{self.source}: its {target_difference(self.identity, identity)} is not that of {identity['source']}"
            )
        self._known_as = dict(identity)

    def to(self, device: torch.device | str) -> Self:
        """Move the model to ``device``, unless its layers are spread over several; or the parts that there are."""
        if not self.whole:
            for weight in self.model.parameters():
                if not weight.is_meta:
                    weight.data = weight.data.to(device)
        elif not devices_of_layers(self.model):
            self.model.to(device)
        return self

    def embedding_weight(self) -> Tensor:
        """Input embeddings, (V, H), as stored: Gemma and Granite scale them on the way in."""
        return self.model.get_input_embeddings().weight

    def head_weight(self) -> Tensor:
        """Rows of the output head, (V, H); the embeddings themselves where the two are tied."""
        return self._parts.head.weight

    @torch.no_grad()
    def forward(
        self, ids_BT: Tensor, view: View, layers: Sequence[int], final_norm: bool = False
    ) -> TargetOutput:
        """Run the T nodes that ``view`` places, without the output head.

        Args:
            view: its cache is None (training: ``View.packed``), or a :class:`TargetCache`, whose slots
                ``view.slots_BT`` the new keys are written to (``View.append``, ``View.chain``).
            layers: boundaries 0..L to return; L is the state before the final norm.
            final_norm: return boundary L after the final norm instead (EAGLE-1's feature).

        Raises:
            ValueError: no such boundary, the view does not fit the cache or the model, or there are no layers to run.
        """
        self._check_whole()
        self._check_boundaries(layers)
        cache = view.cache
        columns = view.visibility.columns
        last = self.num_layers
        if self.recurrent and cache is None and (documents := _documents(view)):
            return self._forward_by_document(ids_BT, documents, layers, final_norm)
        if self.most_slots is not None and columns > self.most_slots:
            raise ValueError(
                f"{columns} slots or tokens are more than {self.most_slots}, where this model's rotary frequencies "
                "start to depend on the sequence's length, which cached keys cannot follow: use shorter sequences"
            )
        if isinstance(cache, TargetCache):
            columns = cache.place(view)
        elif cache is not None:
            raise ValueError(
                f"the target keeps its keys in a TargetCache (new_cache), not a {type(cache).__name__}"
            )
        masks = self._masks(view, columns)
        # each layer gets a mask of its own; this one keeps the family from making any
        no_mask = view.positions_BT.new_ones(1, dtype=torch.bool)
        recorded = frozenset(b for b in layers if b < last or not final_norm)
        with (
            torch.autocast(self.device.type, enabled=False),
            self._tape.running(masks, recorded) as h,
        ):
            final_BTH = self._parts.decoder(
                input_ids=ids_BT,
                attention_mask=no_mask.expand(len(ids_BT), 1, ids_BT.shape[1], columns),
                position_ids=view.positions_BT,
                use_cache=cache is not None,
                **{self._parts.cache_argument: cache},
            ).last_hidden_state.to(ids_BT.device)
        if final_norm:
            h[last] = final_BTH
        if not layers:
            return TargetOutput(
                final_BTH.new_empty((*final_BTH.shape[:2], 0, self.hidden_size)), final_BTH
            )
        return TargetOutput(torch.stack([h[b].to(ids_BT.device) for b in layers], dim=2), final_BTH)

    __call__ = forward

    def _check_boundaries(self, layers: Sequence[int]) -> None:
        for boundary in layers:
            if not 0 <= boundary <= self.num_layers:
                raise ValueError(
                    f"no layer boundary {boundary}: this target has {self.num_layers} layers, so 0 (the embeddings) "
                    f"to {self.num_layers} (before the final norm)"
                )

    def _masks(self, view: View, columns: int) -> list[Mask]:
        """Return each layer's mask over the first ``columns`` keys; None for a layer that does not attend."""
        config = self.config  # its window is read anew each time, since a proof narrows it
        windows = [config.sliding_window if sliding else None for sliding in self._parts.sliding]
        in_pieces = config._attn_implementation in (OURS, OURS_EAGER)
        masks = layer_masks(view, columns, windows, self._parts.head.weight.dtype, in_pieces)
        return [
            mask if attends else None for mask, attends in zip(masks, self.attends, strict=True)
        ]

    def _forward_by_document(
        self,
        ids_BT: Tensor,
        documents: Sequence[tuple[int, slice]],
        layers: Sequence[int],
        final_norm: bool,
    ) -> TargetOutput:
        """Documents of packed rows, which would see each other through a recurrent state: separate rows, in batches
        of similar lengths."""
        B, T = ids_BT.shape
        aux_BTNH = torch.zeros(
            B, T, len(layers), self.hidden_size, dtype=self.dtype, device=ids_BT.device
        )
        final_BTH = aux_BTNH.new_zeros(B, T, self.hidden_size)

        def length(document: tuple[int, slice]) -> int:
            return document[1].stop - document[1].start

        longest_first = sorted(documents, key=length, reverse=True)
        while longest_first:
            longest = length(longest_first[0])
            batch = [document for document in longest_first if 2 * length(document) > longest]
            longest_first = longest_first[len(batch) :]
            # what follows a document does not reach it
            ids_NL = ids_BT.new_zeros(len(batch), longest)
            for n, (row, where) in enumerate(batch):
                ids_NL[n, : where.stop - where.start] = ids_BT[row, where]
            out = self.forward(ids_NL, View.packed(torch.zeros_like(ids_NL)), layers, final_norm)
            for n, (row, where) in enumerate(batch):
                aux_BTNH[row, where] = out.aux_BTNH[n, : where.stop - where.start]
                final_BTH[row, where] = out.final_BTH[n, : where.stop - where.start]
        return TargetOutput(aux_BTNH, final_BTH)

    @torch.no_grad()
    def logits(self, final_BTH: Tensor, rows_D: Tensor | slice | None = None) -> Tensor:
        """The model's logits (B, T, V), scaled and capped as the family does; or those of ``rows_D``, (B, T, D).

        A slice of rows copies no weights. Families agree neither on the names nor on the meaning of what comes after
        the head (Granite divides by its ``logits_scaling``, HyperCLOVA X multiplies), so this runs the model's own
        ``forward`` with a decoder that is already done.
        """
        parts = self._parts
        device = parts.head.weight.device
        decoded = _Stub(None, {"last_hidden_state": final_BTH.to(device)})
        body: dict[str, Any] = {}
        # the decoder, or modules around it: whichever is called
        for depth in range(len(parts.decoder_path), 0, -1):
            module = self.model.get_submodule(".".join(parts.decoder_path[:depth]))
            body = {parts.decoder_path[depth - 1]: _Stub(module, {"output": decoded, **body})}
        if rows_D is not None:
            at = rows_D.to(device) if isinstance(rows_D, Tensor) else rows_D
            weight_DH = parts.head.weight[at]
            bias_D = None if parts.head.bias is None else parts.head.bias[at]
            body[parts.head_name] = lambda x_BTH: F.linear(x_BTH, weight_DH, bias_D)
        with torch.autocast(device.type, enabled=False):
            stub = _Stub(self.model, body)  # some families read the length of the input
            output = type(self.model).forward(stub, inputs_embeds=final_BTH, use_cache=False)
        return output.logits.to(final_BTH.device)

    def new_cache(self, capacity: int, batch: int = 1, nodes: int = 1) -> TargetCache:
        """An empty cache of ``capacity`` slots for each of ``batch`` sequences.

        Args:
            nodes: tokens of a verification at most. A target with recurrent layers reads up to this many one by one
                and can go back to any of them (``TargetCache.rewind``).
        """
        recurrent = [mixer is not None for mixer in self._parts.mixers] if self.recurrent else ()
        return TargetCache(capacity, batch, recurrent, nodes)

    def prove(self) -> None:
        """Check on a short text that taps, head, packing and tree verification agree with the model itself.

        Raises:
            ValueError: something does not; the message says what, and by how much.
        """
        self._check_whole()
        log.info("proving the target: states, logits and cached trees must be the model's own")
        prove(self)


def _documents(view: View) -> list[tuple[int, slice]]:
    """Row and place of every document of packed rows; none if all rows are one document each."""
    if not isinstance(view.visibility, Spans):
        raise ValueError("a target with recurrent layers reads texts, not trees")
    first_BT = view.visibility.first_BT
    T = first_BT.shape[1]
    starts = (first_BT == torch.arange(T, device=first_BT.device)).nonzero().tolist()
    if len(starts) == len(first_BT):
        return []
    ends = [start if start else T for _, start in starts[1:]] + [T]
    return [(row, slice(start, end)) for (row, start), end in zip(starts, ends, strict=True)]


@dataclass(eq=False)
class _Stub:
    """The object ``of``, which is left alone itself, with other attributes; called, it gives its ``output``.

    Of nothing (None), every attribute that is not named is None: what a decoder returns has only its last state.
    """

    of: Any
    named: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.output

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> Any:
        if name in self.named:
            return self.named[name]
        return None if self.of is None else getattr(self.of, name)
