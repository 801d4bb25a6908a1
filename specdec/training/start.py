"""Which weights a drafter's training starts from.

Legend: V vocabulary.
"""

import dataclasses
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.drafter import Drafter, DrafterConfig, choose, load
from specdec.target import Target
from specdec.values import canonical, pairs, words

log = logging.getLogger(__name__)

# of these a design says nothing: another's drafter may have its own, and keeps them
KEPT = {"num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope", "max_position_embeddings"}
OF_THE_TARGET = {"vocab_size", "target_hidden_size", "num_target_layers"}


class Start:
    """Base of the starts: a frozen spec."""

    def check(self, config: DrafterConfig, train_embed: bool, train_head: bool) -> None:
        """Raise ValueError if such a drafter cannot be trained from here with these parts frozen."""

    def drafter(self, config: DrafterConfig, target: Target, counts_V: Tensor) -> Drafter:
        """A drafter, all of it trainable.

        Args:
            config: the design with the target's dimensions.
            counts_V: int64, how often each id is supervised in the training data.
        """
        raise TypeError(f"{type(self).__name__} must say what weights it starts from")


@dataclass(frozen=True)
class FromTarget(Start):
    """Embedding, head and output norm as the target's, the rest at random."""

    def check(self, config: DrafterConfig, train_embed: bool, train_head: bool) -> None:
        """Another width has nothing to start from."""
        if config.hidden_size != config.target_hidden_size and not (train_embed and train_head):
            raise ValueError(
                f"hidden_size {config.hidden_size} is not the target's {config.target_hidden_size}: embedding and head "
                "cannot start from the target's and must be trained: set model.train_embed=true and train_head=true"
            )

    def drafter(self, config: DrafterConfig, target: Target, counts_V: Tensor) -> Drafter:
        """With the draft vocabulary that the training data asks for."""
        drafter = Drafter(config, choose(counts_V, config.draft_vocab_size, target.eos_token_ids))
        scale_H = target.final_norm(torch.ones(target.hidden_size, dtype=target.dtype, device=target.device))
        drafter.warm_start(target.embedding_weight(), target.head_weight(), scale_H)
        return drafter


@dataclass(frozen=True)
class FromDrafter(Start):
    """All weights, and the draft vocabulary, of a saved drafter: of ``fit`` or of ``specdec import``.

    The design must be ``model.drafter``'s, so that a run's config says what it trains. With ``head: target`` the head
    is the present target's.

    Args:
        directory: the drafter's.
    """

    directory: str

    def drafter(self, config: DrafterConfig, target: Target, counts_V: Tensor) -> Drafter:
        """The saved one, which from now on is this target's.

        Raises:
            ValueError: it cannot be read, is for a target of another shape, or has another design.
        """
        saved = load(self.directory, dtype=torch.get_default_dtype())
        self._compare(saved.config, config)
        if saved.config.target.get("fingerprint") != target.identity["fingerprint"]:
            source = saved.config.target.get("source")
            log.warning("%s was trained for another target (%s) of the same shape", self.directory, source)
        drafter = Drafter(dataclasses.replace(saved.config, target=config.target), saved.vocab.target_ids_D)
        drafter.load_state_dict(saved.state_dict())
        if config.head == "target":
            with torch.no_grad():
                drafter.lm_head.weight.copy_(target.head_weight())
        log.info("the drafter starts from %s", self.directory)
        return drafter

    def _compare(self, saved: DrafterConfig, wanted: DrafterConfig) -> None:
        one, two = (canonical(config.to_json()) for config in (saved, wanted))
        found = [(key, a, b) for key, a, b in pairs(one, two) if key.partition(".")[0] not in KEPT | {"target"}]
        if other := [f"{key} {a}, the target has {b}" for key, a, b in found if key in OF_THE_TARGET]:
            raise ValueError(f"{self.directory}: the drafter is for another target, of {'; '.join(other)}")
        if found:
            told = "; ".join(f"{key} is {words(a)}, not {words(b)}" for key, a, b in found)
            raise ValueError(
                f"{self.directory}: the drafter is not of the design in model.drafter: {told}: set model.drafter to "
                "the drafter's own"
            )
