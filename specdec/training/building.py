"""From a design, a target, its data and weights to start from to a drafter that is ready to train.

Legend: V vocabulary, D draft vocabulary, H hidden, T tokens.
"""

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.data import TokenData
from specdec.drafter import (
    GQA,
    Drafter,
    DrafterConfig,
    DrafterSpec,
    PreNorm,
    load_drafter,
    most_frequent_ids,
)
from specdec.drafter.dry_run import dry_run
from specdec.drafter.io import located
from specdec.target import Target
from specdec.target.identity import same_target
from specdec.utils.config import differences, normalize_config, to_text

log = logging.getLogger(__name__)

# a design does not set these: a saved drafter keeps its own
KEPT = {"rms_norm_eps", "rope", "max_position_embeddings", "logit_scale"}
LOW_COVERAGE = 0.9  # of the supervised tokens, by the draft vocabulary
TARGET_IDS = "train_step.drafter.vocab.target_ids_D"  # in a checkpoint's state dict
OF_THE_TARGET = {"vocab_size", "target_hidden_size", "num_target_layers"}


class Start:
    """Base of the starts: a frozen spec."""

    def check(self) -> None:
        """Raise ValueError for what cannot be started from, before a target is loaded."""

    def drafter(self, config: DrafterConfig, target: Target, counts_V: Tensor) -> Drafter:
        """A drafter, all of it trainable; ``counts_V``: int64, how often training data supervise each id."""
        raise TypeError(f"{type(self).__name__} must say what weights it starts from")


@dataclass(frozen=True)
class FromTarget(Start):
    """Embedding and head as the target's, the rest at random; see :meth:`specdec.drafter.Drafter.warm_start`."""

    def drafter(self, config: DrafterConfig, target: Target, counts_V: Tensor) -> Drafter:
        """Return a drafter whose draft vocabulary is the tokens that training data supervise most."""
        drafter = Drafter(
            config, most_frequent_ids(counts_V, config.draft_vocab_size, target.eos_token_ids)
        )
        drafter.warm_start(target.embedding_weight(), target.head_weight())
        return drafter


@dataclass(frozen=True)
class FromDrafter(Start):
    """All weights, and the draft vocabulary, of a saved drafter: of ``fit`` or of ``specdec import``.

    ``directory`` may be a name on the Hub, as ``USER/NAME``. The design must be ``model.drafter``'s. With
    ``head: target`` the head is the present target's.
    """

    directory: str

    def check(self) -> None:
        """The directory must be there, or be had from the Hub."""
        try:
            located(self.directory)
        except ValueError as error:
            raise ValueError(f"model.start: {error}") from error

    def drafter(self, config: DrafterConfig, target: Target, counts_V: Tensor) -> Drafter:
        """The saved drafter, bound to this target; ValueError if target or design differ."""
        saved = load_drafter(self.directory, dtype=torch.get_default_dtype())
        saved_design = normalize_config(saved.config.to_json())
        wanted_design = normalize_config(config.to_json())
        differing = [
            (key, a, b)
            for key, a, b in differences(saved_design, wanted_design)
            if key.partition(".")[0] not in KEPT | {"target"}
        ]
        if other := [
            f"{key} {a}, the target has {b}" for key, a, b in differing if key in OF_THE_TARGET
        ]:
            raise ValueError(
                f"{self.directory}: the drafter is for another target, of {'; '.join(other)}"
            )
        if differing:
            changes = "; ".join(
                f"{key} is {to_text(a)}, not {to_text(b)}" for key, a, b in differing
            )
            raise ValueError(
                f"{self.directory}: the drafter is not of the design in model.drafter: {changes}: set "
                "model.drafter to the drafter's own"
            )
        if not target.is_of(saved.config.target):
            source = saved.config.target.get("source")
            log.warning(
                "%s was trained for another target (%s) of the same shape", self.directory, source
            )
        scale = config.logit_scale if config.head == "target" else saved.config.logit_scale
        bound = dataclasses.replace(saved.config, target=config.target, logit_scale=scale)
        drafter = Drafter(bound, saved.vocab.target_ids_D)
        drafter.load_state_dict(saved.state_dict())
        if config.head == "target":
            with torch.no_grad():
                drafter.lm_head.weight.copy_(target.head_weight())
        log.info("the drafter starts from %s", self.directory)
        return drafter


def config_for(spec: DrafterSpec, target: Target) -> DrafterConfig:
    """A design with a loaded target's dimensions; ValueError if they do not go together."""
    scale = logit_scale(target) if spec.head == "target" else 1.0
    sizes = {"vocab_size": target.vocab_size, "num_target_layers": target.num_layers}
    return DrafterConfig.for_target(
        spec, target.config, **sizes, identity=target.identity, logit_scale=scale
    )


def logit_scale(target: Target) -> float:
    """What the target multiplies its head's products by, which families call by different names, one of them its
    reciprocal: measured.

    Raises:
        ValueError: its logits are no positive multiple of the products.
    """
    generator = torch.Generator().manual_seed(0)
    # far enough that a cap tells
    final_1TH = 10 * torch.randn(1, 4, target.hidden_size, generator=generator)
    final_1TH = final_1TH.to(device=target.device, dtype=target.dtype)
    # the same product, to the last bit
    plain_1TV = nn.functional.linear(final_1TH, target.head_weight())
    logits_1TV = target.logits(final_1TH)
    if torch.equal(logits_1TV.to(plain_1TV.dtype), plain_1TV):
        return 1.0
    wide = logits_1TV.double()
    plain = plain_1TV.double()
    measured = float((wide * plain).sum() / plain.square().sum())
    # configs have a short number, or one whose reciprocal is short, and the measured one is that but for rounding
    short = [float(f"{measured:.4g}"), 1 / float(f"{1 / measured:.4g}")] if measured > 0 else []
    rounding_1TV = 2 * torch.finfo(target.dtype).eps * plain.abs()
    for scale in (*sorted(short, key=lambda value: abs(value - measured)), measured):
        if scale > 0 and bool(((wide - scale * plain).abs() <= scale * rounding_1TV).all()):
            return scale
    raise ValueError(
        "head=target: this target's logits have a bias or a cap, which drafters of method eagle have no place for: "
        "train a drafter with its own head, as --model.drafter conf/drafter/eagle3_1.yaml"
    )


def new_drafter(
    target: Target,
    spec: DrafterSpec = DrafterSpec(),  # noqa: B008  frozen
    counts_V: Tensor | None = None,
) -> Drafter:
    """A new drafter for a target: embedding and head are the target's, the rest is random.

    Args:
        counts_V: int64, how often the training data supervise each id (``TokenData.supervised_counts``), by which the
            draft vocabulary is chosen; not needed where the design takes the whole vocabulary.

    Raises:
        ValueError: design and target do not go together, or the counts are missing.
    """
    config = config_for(spec, target)
    if counts_V is None:
        if config.draft_vocab_size < config.vocab_size:
            raise ValueError(
                f"a draft vocabulary of {config.draft_vocab_size} of {config.vocab_size} tokens is chosen by the "
                "training data: give data.supervised_counts(target.vocab_size), or set draft_vocab_size='all'"
            )
        counts_V = torch.zeros(config.vocab_size, dtype=torch.int64)
    return FromTarget().drafter(config, target, counts_V)


def build(
    spec: DrafterSpec,
    target: Target,
    data: TokenData,
    start: Start,
    train_embed: bool,
    train_head: bool,
    ttt_steps: int,
) -> Drafter:
    """A drafter with the target's dimensions and weights to start from, and the trainable sets chosen; ValueError if
    design, target, data and training do not go together."""
    config = config_for(spec, target)
    check(
        config,
        data.seq_len,
        target.config.max_position_embeddings,
        start,
        train_embed,
        train_head,
        ttt_steps,
    )
    log.info("building the drafter")
    counts_V = data.supervised_counts(config.vocab_size)
    is_counted = bool(counts_V.any())
    if not is_counted and not isinstance(start, FromDrafter):
        check_needs_no_counts(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())  # the run's, whatever was drawn since
        drafter = start.drafter(config, target, counts_V)
    dry_run(drafter)
    if ttt_steps > 1 and isinstance(config.recurrence, PreNorm) and not config.norms.hidden:
        log.warning(
            "ttt_steps %d feeds un-normalized states back: their magnitude may grow", ttt_steps
        )
    drafter.embed_tokens.requires_grad_(train_embed)
    drafter.lm_head.requires_grad_(train_head)
    ids_D = drafter.vocab.target_ids_D
    # nothing says that a token is missing where no answer is written yet
    covered = float(counts_V[ids_D].sum() / counts_V.sum()) if is_counted else 1.0
    trainable = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    log.info(
        "drafter: %s trainable parameters, boundaries %s of %d, draft vocabulary %d covering %.2f %% of the text",
        f"{trainable:,}", list(config.aux_layers), config.num_target_layers, len(ids_D), 100 * covered,
    )  # fmt: skip
    mask = getattr(config.recurrence, "mask_token_id", None)
    if mask is not None and counts_V[mask]:
        log.warning(
            "the mask, token %d, stands for drafts, and the text has it, too (%s times): choose a token that texts do "
            "not hold, model.drafter.recurrence.init_args.mask_token_id", mask, f"{int(counts_V[mask]):,}",
        )  # fmt: skip
    if covered < LOW_COVERAGE:
        log.warning(
            "the draft vocabulary has %.0f %% of the supervised tokens, and the drafter cannot propose the others: "
            "raise model.drafter.draft_vocab_size", 100 * covered,
        )  # fmt: skip
    return drafter


def check_needs_no_counts(config: DrafterConfig) -> None:
    """Raise ValueError for a draft vocabulary that has to be chosen before the target has written an answer."""
    if config.draft_vocab_size < config.vocab_size:
        raise ValueError(
            f"a draft vocabulary of {config.draft_vocab_size} of {config.vocab_size} tokens is chosen by how often the "
            "answers have each, and they are not written yet: set model.drafter.draft_vocab_size=all, or start from a "
            "drafter that has its vocabulary (model.start=FromDrafter)"
        )


def check_early(
    spec: DrafterSpec, hf_config: Any, seq_len: int, start: Start, *trained: Any
) -> None:
    """:func:`check` before a target is loaded, from its configuration alone, where that is known (not None)."""
    if (config := early_config(spec, hf_config)) is not None:
        check(config, seq_len, hf_config.max_position_embeddings, start, *trained)


def early_config(spec: DrafterSpec, hf_config: Any) -> DrafterConfig | None:
    """:func:`config_for` before a target is loaded, from its configuration alone; None where that is unknown, or of no
    family that can be a target."""
    if hf_config is None or not hasattr(hf_config, "num_attention_heads"):
        return None
    sizes = {"vocab_size": hf_config.vocab_size, "num_target_layers": hf_config.num_hidden_layers}
    return DrafterConfig.for_target(spec, hf_config, **sizes, identity={})


def check_shapes(config: DrafterConfig) -> None:
    """Raise ValueError for shapes and positions that no engine can load, which a drafter would inherit of its target.

    Engines read the config of a drafter without norms on queries and keys as transformers' LlamaConfig, which needs
    a hidden size that the heads divide; longrope's factors are chosen by how long texts a server allows.
    """
    hidden = config.hidden_size
    heads = config.num_attention_heads
    groups = config.num_key_value_heads
    if type(config.attention) is GQA and not config.norms.query_key and hidden % heads:
        fitting = [n for n in range(1, heads) if hidden % n == 0 and n % groups == 0][-2:]
        keys = "" if fitting else "and num_key_value_heads "
        fitting = fitting or [n for n in range(1, heads) if hidden % n == 0][-2:]
        raise ValueError(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and no engine loads such a drafter: "
            f"set model.drafter.num_attention_heads {keys}to {' or '.join(map(str, reversed(fitting)))}, or "
            "norms.query_key=true, whose config engines read otherwise"
        )
    if config.rope["rope_type"] == "longrope":
        raise ValueError(
            "the drafter would have the target's rope_type longrope, which no engine serves, since its factors would "
            "be chosen by the server's max_model_len: set model.drafter.rope_theta=10000, or another, for its own rope"
        )


def check(
    config: DrafterConfig,
    seq_len: int,
    positions: int,
    start: Start,
    train_embed: bool,
    train_head: bool,
    ttt_steps: int,
) -> None:
    """Raise ValueError for what is wrong before target and data are loaded; ``positions``: the target's maximum."""
    check_shapes(config)
    if seq_len > positions:
        raise ValueError(f"data.seq_len {seq_len} exceeds the target's {positions} positions")
    narrow = config.hidden_size != config.target_hidden_size
    if isinstance(start, FromTarget) and narrow and not (train_embed and train_head):
        raise ValueError(
            f"hidden_size {config.hidden_size} is not the target's {config.target_hidden_size}: embedding and head "
            "cannot start from the target's and must be trained: set model.train_embed=true and train_head=true"
        )
    config.drafting.check_training(type(config.recurrence).__name__, ttt_steps)
    if not isinstance(config.attention_window, str) and config.attention_window < ttt_steps:
        raise ValueError(
            f"attention_window {config.attention_window} is less than ttt_steps {ttt_steps}: in the unroll a node "
            "sees all of its own steps; widen the window or unroll less"
        )


def stored_config(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the drafter's config in a checkpoint, as JSON; ValueError if there is none."""
    stored: dict[str, Any] | None = checkpoint.get("drafter_config")
    if stored is None:
        raise ValueError(
            "this checkpoint has no drafter config: neither specdec fit nor a DrafterModule wrote it"
        )
    return stored


def drafter_of_checkpoint(checkpoint: dict[str, Any]) -> Drafter:
    """Return a drafter of a checkpoint's design and draft vocabulary; its weights are still random."""
    config = DrafterConfig.from_json(stored_config(checkpoint), "the checkpoint")
    ids_D = checkpoint["state_dict"].get(TARGET_IDS)
    if ids_D is None:
        raise ValueError(f"the checkpoint is damaged: it has no {TARGET_IDS}")
    return Drafter(config, ids_D)


def check_checkpoint(checkpoint: dict[str, Any], drafter: Drafter) -> None:
    """Raise ValueError unless a checkpoint's weights belong to this drafter's config, target and draft vocabulary."""
    stored = stored_config(checkpoint)
    now = drafter.config.to_json()
    # wherever it lies now, whole or in parts
    if same_target(stored.get("target") or {}, now["target"]):
        stored = stored | {"target": now["target"]}
    if different := sorted(key for key in now if stored.get(key) != now[key]):
        raise ValueError(
            "the checkpoint belongs to another drafter; these differ from the present config: "
            + "; ".join(f"{key} was {stored.get(key)}, is {now[key]}" for key in different)
        )
    ids_D = checkpoint["state_dict"][TARGET_IDS]
    if not torch.equal(ids_D.cpu(), drafter.vocab.target_ids_D.cpu()):
        raise ValueError(
            "the checkpoint's draft vocabulary is not the one of the present training data"
        )
