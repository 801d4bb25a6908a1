"""From a design, a target and its data to a drafter that is ready to train.

Legend: V vocabulary, D draft vocabulary, H hidden, T tokens.
"""

import logging
from typing import Any

import torch

from specdec.data import TokenData
from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, PreNorm
from specdec.drafter.dry_run import dry_run
from specdec.target import Target
from specdec.training.start import Start

log = logging.getLogger(__name__)


def config_for(spec: DrafterSpec, target: Target) -> DrafterConfig:
    """A design with a loaded target's dimensions.

    Raises:
        ValueError: design and target do not go together.
    """
    return DrafterConfig.for_target(
        spec,
        target.config,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        identity=target.identity,
    )


def build(
    spec: DrafterSpec,
    target: Target,
    data: TokenData,
    start: Start,
    train_embed: bool,
    train_head: bool,
    ttt_steps: int,
) -> Drafter:
    """A drafter with the target's dimensions and weights to start from, and the trainable sets chosen.

    Raises:
        ValueError: design, target, data and training do not go together; the message says why.
    """
    config = config_for(spec, target)
    check(config, data.seq_len, target.config.max_position_embeddings, start, train_embed, train_head, ttt_steps)
    if config.head == "target":
        _check_plain_head(target)
    counts_V = data.supervised_counts(config.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())  # the run's, whatever was drawn since
        drafter = start.drafter(config, target, counts_V)
    dry_run(drafter)
    if ttt_steps > 1 and isinstance(config.recurrence, PreNorm) and not config.norms.hidden:
        log.warning("ttt_steps %d feeds un-normalised states back: their magnitude may grow", ttt_steps)
    drafter.embed_tokens.requires_grad_(train_embed)
    drafter.lm_head.requires_grad_(train_head)
    ids_D = drafter.vocab.target_ids_D
    covered = float(counts_V[ids_D].sum() / counts_V.sum().clamp(min=1))
    trainable = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    log.info(
        "drafter: %s trainable parameters, boundaries %s of %d, draft vocabulary %d covering %.2f %% of the text",
        f"{trainable:,}", list(config.aux_layers), config.num_target_layers, len(ids_D), 100 * covered,
    )  # fmt: skip
    return drafter


def check(
    config: DrafterConfig,
    seq_len: int,
    positions: int,
    start: Start,
    train_embed: bool,
    train_head: bool,
    ttt_steps: int,
) -> None:
    """What can be said before target and data are loaded.

    Args:
        positions: that the target has.

    Raises:
        ValueError: design and training do not go together; the message says why.
    """
    if seq_len > positions:
        raise ValueError(f"data.seq_len {seq_len} exceeds the target's {positions} positions")
    start.check(config, train_embed, train_head)
    if not isinstance(config.attention_window, str) and config.attention_window < ttt_steps:
        raise ValueError(
            f"attention_window {config.attention_window} is less than ttt_steps {ttt_steps}: in the unroll a node "
            "sees all of its own steps; widen the window or unroll less"
        )


def check_checkpoint(checkpoint: dict[str, Any], drafter: Drafter) -> None:
    """Raise ValueError unless a checkpoint's weights belong to this drafter's config, target and draft vocabulary."""
    stored, now = checkpoint.get("drafter_config"), drafter.config.to_json()
    if stored is None:
        raise ValueError("this checkpoint holds no drafter config: it was not written by specdec fit")
    if different := sorted(key for key in now if stored.get(key) != now[key]):
        raise ValueError(
            "the checkpoint belongs to another drafter; these differ from the present config: "
            + "; ".join(f"{key} was {stored.get(key)}, is {now[key]}" for key in different)
        )
    ids_D = checkpoint["state_dict"]["drafter.vocab.target_ids_D"]
    if not torch.equal(ids_D.cpu(), drafter.vocab.target_ids_D.cpu()):
        raise ValueError("the checkpoint's draft vocabulary is not the one of the present training data")


def _check_plain_head(target: Target) -> None:
    """Raise ValueError if the target's logits are more than a matrix times the state (a bias, scale or cap)."""
    final_1TH = torch.randn(1, 4, target.hidden_size, generator=torch.Generator().manual_seed(0))
    final_1TH = final_1TH.to(device=target.device, dtype=target.dtype)
    plain_1TV = final_1TH @ target.head_weight().T
    if not torch.allclose(target.logits(final_1TH), plain_1TV, rtol=1e-2, atol=1e-2 * float(plain_1TV.abs().max())):
        raise ValueError(
            "head=target cannot be used with this target: its logits have a bias, scale or cap that EAGLE-1's drafter "
            "has no place for; use head=own"
        )
