"""Training and cached decoding say the same of a real row: ``specdec parity`` at a few places, without an export."""

from collections.abc import Iterator

import torch

from specdec.doctor.finding import Finding, judged, unchecked
from specdec.doctor.subject import Subject
from specdec.parity.run import parity
from specdec.parity.texts import Text

NAME = "parity"
LONGEST = 64  # tokens of a text


@torch.no_grad()
def agreement(subject: Subject) -> Iterator[Finding]:
    """The largest difference of a log-probability over places and depths, as a share of their range."""
    depth = subject.depths - 1
    texts = []
    for document in subject.documents():
        ids = document.ids_T[:LONGEST].tolist()
        begin = int(document.loss_mask_T[:LONGEST].long().argmax()) or len(ids) // 2
        if len(ids) >= begin + depth + 4:
            texts.append(Text(ids, begin))
        if len(texts) == 2:
            break
    what = f"unrolled logits are cached decoding's at depths 0 to {depth}, of {len(texts)} real texts"
    if not texts:
        yield unchecked(NAME, what, f"no document goes on for {depth + 4} tokens behind its first supervised one")
        return
    weight = subject.target.embedding_weight()
    drafter = subject.decoding() if subject.begun else subject.lively().to(weight)
    found = parity(subject.target, drafter, texts, depth, None)
    worst = max(found.rows, key=lambda row: row.share if row.share == row.share else float("inf"))
    yield judged(
        NAME, what, worst.share, "at most", worst.allowed,
        f"{worst.verdict}, at depth {worst.depth} ({worst.place}): what is trained is not what is decoded, so "
        "that a good loss and accuracy end in low acceptance; specdec parity shows every place",
    )  # fmt: skip
