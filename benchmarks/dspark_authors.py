"""DSpark beside its authors' code: the same drafts, the same confidences, the same loss.

An export is loaded into the authors' class as it stands, and both draft greedily at every third place of a random text
(float64, except for their norms, which compute in float32). Their loss function gets our logits and estimates of a text
that is supervised whole, and is compared with a training step. Then faults are planted in their model and in the
settings of their loss. The exit status is 1 if anything differs, or a fault is not seen.

    git clone https://github.com/deepseek-ai/DeepSpec /tmp/deepspec
    python benchmarks/dspark_authors.py --source /tmp/deepspec --out benchmarks/results/dspark_authors.md

Legend: B texts, T tokens, A anchors, K drafts, N aux layers, V vocabulary.
"""

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from benchmarks.harness import conditions, machine
from specdec.data import Batch
from specdec.diagnostics.anchors import AnchoredText
from specdec.diagnostics.loud import loud_drafter, loud_spec
from specdec.drafter import Drafter, MarkovBlock
from specdec.drafting.slots import supervised
from specdec.export import export_drafter
from specdec.target import Target
from specdec.training.confidence import ConfidenceLoss
from specdec.training.divergences import HardCrossEntropy, TotalVariation
from specdec.training.losses import Term, WeightedSum
from specdec.training.step import ObjectiveConfig, TrainStep, target_outputs
from specdec.training.step_weights import Decay
from specdec.utils.files import write_text

VOCAB, DRAFTS, GAMMA = 96, 5, 4.0
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": None,
    "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
LOSSES = {"ce_loss_alpha": 0.1, "l1_loss_alpha": 0.9, "confidence_head_alpha": 1.0}


class Pair(NamedTuple):
    """A drafter, and its export in the authors' class."""

    target: Target
    drafter: Drafter
    theirs: Any
    ids: list[int]


def make_pair(folder: Path) -> Pair:
    """A random target and a drafter that depends on everything."""
    from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).double()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    target = Target(model)
    spec = dataclasses.replace(
        loud_spec(target, "dspark"),
        recurrence=MarkovBlock(masks=DRAFTS - 1, rank=16),
        num_layers=2,
        aux_layers=[1, 3, 5],
    )
    drafter = loud_drafter(target, spec)
    export_drafter(drafter, target, folder)
    config = Qwen3Config.from_json_file(folder / "config.json")
    config._attn_implementation = "eager"
    weights = load_file(folder / "model.safetensors")
    weights["embed_tokens.weight"] = target.embedding_weight()
    weights["lm_head.weight"] = target.head_weight()
    theirs = Qwen3DSparkModel(config).double().eval()
    theirs.load_state_dict(weights, strict=True)
    ids = torch.randint(0, VOCAB - 1, (64,)).tolist()
    return Pair(target, drafter, theirs, ids)


@torch.no_grad()
def their_drafts(pair: Pair, aux_1TNH: Tensor, anchor: int) -> tuple[Tensor, Tensor, Tensor]:
    """Their greedy drafts behind an anchor, (K,), with log-probabilities (K, V) and confidences (K,)."""
    mask = pair.theirs.mask_token_id
    block = torch.tensor([[pair.ids[anchor], *[mask] * (DRAFTS - 1)]])
    hidden = pair.theirs._forward_backbone(
        position_ids=torch.arange(anchor + DRAFTS)[None],
        noise_embedding=pair.theirs.embed_tokens(block),
        target_hidden_states=aux_1TNH[:, :anchor].flatten(2),
        is_causal=False,
    )
    tokens, logits = pair.theirs.sample_draft_tokens(
        pair.theirs.compute_logits(hidden), first_prev_token_ids=block[:, 0], hidden_states=hidden
    )
    previous = torch.cat([block[:, :1], tokens[:, :-1]], 1)
    confidence = pair.theirs.predict_confidence_step(hidden, prev_token_ids=previous)
    return tokens[0], logits[0].log_softmax(-1), confidence[0].sigmoid()


def compare_drafts(pair: Pair) -> dict[str, float]:
    """Compare at every third place."""
    text = AnchoredText(pair.target, pair.drafter, pair.ids, DRAFTS)
    anchors = range(3, len(pair.ids) - DRAFTS, 3)
    different = 0
    gap = 0.0
    said = set()
    for anchor in anchors:
        chains = text.draft([anchor])
        tokens, log_probs, confidence = their_drafts(pair, text.out.aux_BTNH, anchor)
        assert chains.confidence_AK is not None
        different += int((tokens != chains.tokens_AK[0]).sum())
        gap = max(gap, float((log_probs - chains.log_probs_AKD[0]).abs().max()))
        gap = max(gap, float((confidence - chains.confidence_AK[0]).abs().max()))
        said |= set(tokens.tolist())
    return {
        "drafts": len(anchors) * DRAFTS,
        "different": different,
        "largest gap": gap,
        "distinct tokens drafted": len(said),
    }


def compare_losses(pair: Pair, **changes: float) -> dict[str, float]:
    """Compare their loss function of our logits and estimates with a training step's, over one text.

    Args:
        changes: of the settings of theirs.
    """
    settings = {"gamma": GAMMA, **LOSSES, **changes}
    gamma = settings.pop("gamma")
    from deepspec.modeling.dspark import loss as their_loss  # type: ignore[import-not-found]
    from deepspec.modeling.dspark.common import (  # type: ignore[import-not-found]
        DSparkForwardOutput,
    )

    ids_1T = torch.tensor([pair.ids])
    T = len(pair.ids)
    batch = Batch(ids_1T, torch.ones_like(ids_1T, dtype=torch.bool), torch.zeros_like(ids_1T))
    losses = [
        Term(HardCrossEntropy(), 0.1), Term(TotalVariation(), 1.8), Term(ConfidenceLoss(), 1.0),
    ]  # fmt: skip
    decay = Decay(float(torch.tensor(-1 / GAMMA, dtype=torch.float64).exp()))
    recipe = ObjectiveConfig(WeightedSum(losses), DRAFTS, decay)
    outputs = target_outputs(pair.target, pair.drafter, batch, recipe)
    ours = float(TrainStep(pair.drafter, recipe)(batch, outputs).loss)
    steps = list(pair.drafter.unroll(ids_1T, outputs.aux_BTNH, batch.documents_BT, DRAFTS))
    logits_TKV = torch.stack([pair.drafter.logits(step.normed_BTH[0]) for step in steps], 1)
    head = pair.drafter.recurrence
    confidence = torch.stack([head.confidence_logits(step.normed_BTH[0]) for step in steps], 1)  # type: ignore[operator]
    target_TV = pair.target.logits(outputs.final_BTH)[0]
    place_TK = (torch.arange(T)[:, None] + 1 + torch.arange(DRAFTS)).clamp_max(T - 1)
    due_TKV = target_TV[place_TK]
    trained = [supervised(batch.loss_mask_BT, batch.documents_BT, k)[0] for k in range(DRAFTS)]
    mask_TK = torch.stack(trained, 1)
    made = DSparkForwardOutput(
        draft_logits=logits_TKV[None], target_ids=due_TKV.argmax(-1)[None], eval_mask=mask_TK[None],
        block_keep_mask=mask_TK.any(-1)[None], confidence_pred=confidence[None], aligned_target_logits=due_TKV[None],
    )  # fmt: skip
    sums, has_confidence = their_loss._collect_local_terms(
        outputs=made, loss_decay_gamma=gamma, l1_loss_alpha=settings["l1_loss_alpha"]
    )
    theirs = their_loss._build_loss(
        loss_terms=sums, global_denominators=sums, has_confidence=has_confidence, world_size=1, **settings
    )  # fmt: skip
    return {"ours": ours, "theirs": float(theirs), "gap": abs(ours - float(theirs))}


def _rolled(weight: Tensor) -> None:
    weight.copy_(weight.roll(1, 0))


FAULTS: dict[str, Callable[[Any], object]] = {
    "the token before a draft one off": lambda model: _rolled(model.markov_head.markov_w1.weight),
    "no Markov head": lambda model: model.markov_head.markov_w2.weight.zero_(),
    "another mask": lambda model: setattr(model, "mask_token_id", model.mask_token_id - 1),
    "the context's norm at ones": lambda model: model.hidden_norm.weight.fill_(1),
    "a layer's norm of keys at ones": lambda model: model.layers[1].self_attn.k_norm.weight.fill_(
        1
    ),
    "the states in another order": lambda model: model.fc.weight.copy_(model.fc.weight.roll(64, 1)),
    "the confidence head's bias one off": lambda model: model.confidence_head.proj.bias.add_(1),
}
CLOSE = 1e-5  # float32 norms in their model, and a float32 loss
LOSS_FAULTS: dict[str, dict[str, float]] = {
    "another decay": {"gamma": 3.0},
    "another weight of cross-entropy": {"ce_loss_alpha": 0.2},
    "another weight of total variation": {"l1_loss_alpha": 0.8},
    "another weight of the confidence head": {"confidence_head_alpha": 0.5},
}


def main() -> None:
    """Compare, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True, help="a checkout of DeepSpec")
    parser.add_argument("--revision", default="unknown", help="the checkout's commit")
    parser.add_argument("--out", type=Path, help="a Markdown file to write")
    options = parser.parse_args()
    sys.path.insert(0, str(options.source))
    with tempfile.TemporaryDirectory() as scratch:
        pair = make_pair(Path(scratch) / "export")
        drafts = compare_drafts(pair)
        losses = compare_losses(pair)
        software = {name: version(name) for name in ("torch", "transformers")}
        software["DeepSpec"] = options.revision
        lines = ["# DSpark beside its authors' code", "", *conditions(machine(1), software), ""]
        lines += [str(__doc__).split("\n\n")[1], ""]
        lines += ["| drafts | |", "|---|---|"]
        lines += [f"| {name} | {value:.3g} |" for name, value in drafts.items()]
        lines += ["", "| loss | |", "|---|---|"]
        lines += [f"| {name} | {value:.8g} |" for name, value in losses.items()]
        lines += [
            "",
            "| planted in the authors' copy | different drafts | largest gap |",
            "|---|---|---|",
        ]
        state = {name: value.clone() for name, value in pair.theirs.state_dict().items()}
        mask = pair.theirs.mask_token_id
        equal = not drafts["different"] and max(drafts["largest gap"], losses["gap"]) < CLOSE
        seen = True
        for name, plant in FAULTS.items():
            with torch.no_grad():
                plant(pair.theirs)
            faulty = compare_drafts(pair)
            seen &= faulty["largest gap"] > CLOSE
            lines.append(f"| {name} | {faulty['different']} | {faulty['largest gap']:.3g} |")
            pair.theirs.load_state_dict(state)
            pair.theirs.mask_token_id = mask
        lines += ["", "| planted in their loss | gap |", "|---|---|"]
        for name, changes in LOSS_FAULTS.items():
            gap = compare_losses(pair, **changes)["gap"]
            seen &= gap > CLOSE
            lines.append(f"| {name} | {gap:.3g} |")
    page = "\n".join(lines) + "\n"
    sys.stdout.write(page)
    if options.out is not None:
        write_text(options.out, page)
    raise SystemExit(0 if equal and seen else 1)


if __name__ == "__main__":
    main()
