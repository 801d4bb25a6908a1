"""A LightningModule of one's own around ``Drafter``, with a loss that specdec does not have.

python examples/own_module.py --target DIR_OR_HUB_ID --train 'texts/*.txt' --out drafters/own
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor

from specdec import (
    Batch,
    DrafterSpec,
    EmbeddedData,
    SpeculativeDecoder,
    Target,
    TextData,
    TokenData,
    View,
    new_drafter,
    save_drafter,
)
from specdec.drafting.slots import reachable, shift


# the guide begins
class AcceptedDrafts(pl.LightningModule):
    """Maximises the expected number of drafts that a greedy target accepts from a chain drawn from the drafter.

    If draft k is the target's own choice with probability q_k, that number is q_0 + q_0 q_1 + q_0 q_1 q_2 + ...; the
    loss is minus its logarithm. So a depth counts as much as decoding gets there, which no loss of single steps knows.
    """

    def __init__(
        self, target: Target, data: TokenData, spec: DrafterSpec, steps: int = 4, lr: float = 3e-4
    ) -> None:
        super().__init__()
        # a Target is no nn.Module: frozen, and in no checkpoint
        self.target = target
        self.steps = steps
        self.lr = lr
        self.drafter = new_drafter(target, spec, data.supervised_counts(target.vocab_size))
        self.drafter.embed_tokens.requires_grad_(False)  # stays the target's

    def on_fit_start(self) -> None:
        self.target.to(self.device)

    def loss(self, batch: Batch) -> Tensor:
        drafter, config = self.drafter, self.drafter.config
        view = View.packed(batch.documents_BT)  # rows hold several documents, and none sees another
        said = self.target(batch.ids_BT, view, config.aux_layers, config.fusion.final_norm)
        # -1: not in its vocabulary
        choice_BT = drafter.vocab.to_draft(self.target.logits(said.final_BTH).argmax(-1))
        aux_BTNH = said.aux_BTNH.to(drafter.lm_head.weight.dtype)
        log_run_BT, log_runs = torch.zeros_like(choice_BT, dtype=torch.float32), []
        for k, step in enumerate(
            drafter.unroll(batch.ids_BT, aux_BTNH, batch.documents_BT, self.steps)
        ):
            # at step k, slot t drafts what the target chooses at t + 1 + k
            wanted_BT = shift(choice_BT, 1 + k)
            log_q_BTD = drafter.logits(step.normed_BTH).float().log_softmax(-1)
            log_q_BT = log_q_BTD.gather(-1, wanted_BT.clamp_min(0)[..., None])[..., 0]
            log_run_BT = log_run_BT + log_q_BT.masked_fill(wanted_BT < 0, -30.0)  # never accepted
            log_runs.append(log_run_BT)
        # all of its steps are supervised
        slots_BT = reachable(batch.loss_mask_BT, batch.documents_BT, self.steps - 1)
        return -(torch.stack(log_runs).logsumexp(0) * slots_BT).sum() / slots_BT.sum().clamp(min=1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), batch_size=len(batch.ids_BT))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            (p for p in self.parameters() if p.requires_grad), self.lr, weight_decay=0.0
        )


# the guide ends
def main(argv: list[str] | None = None) -> AcceptedDrafts:
    """Train, save and decode once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="embedded", help="a directory or Hub id")
    parser.add_argument(
        "--train", help="text files; without them, what the embedded target was trained on"
    )
    parser.add_argument("--out", default="drafters/own", help="the drafter's directory, a new one")
    parser.add_argument("--max_steps", type=int, default=300)
    parser.add_argument("--seq_len", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64, help="to decode in the end")
    given = parser.parse_args(argv)
    pl.seed_everything(0, verbose=False)
    target = Target.load(given.target)
    size = {"seq_len": given.seq_len, "batch_size": 8}
    data = TextData(given.train, **size) if given.train else EmbeddedData(**size)
    # the module wants the draft vocabulary before the trainer would read the data
    data.prepare(target.tokenizer)
    module = AcceptedDrafts(target, data, DrafterSpec(draft_vocab_size=2000))
    trainer = pl.Trainer(
        max_steps=given.max_steps, gradient_clip_val=0.5, logger=False, enable_checkpointing=False
    )
    trainer.fit(module, datamodule=data)
    save_drafter(module.drafter, given.out)
    print(SpeculativeDecoder(target, module.drafter).generate("def main(", given.tokens))
    return module


if __name__ == "__main__":
    main()
