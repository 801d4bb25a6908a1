"""What the drafter is worth, whatever the machine: acceptance of every shape, from one run over the prompts' answers.

What is drafted after a text depends on that text alone, since every pass overwrites the drafter's guessed rows by rows
of true features. So drafting once at each place of the greedy answers tells what any shape accepts at any place, and
decoding with it can be replayed: from place 0 go on by what is accepted, and one.

A shape keeps the best of all candidates down to its depth, with the parents always ahead of their children: the nodes
of a smaller tree are among those of a larger one of that width and depth. So of every place only this is kept: the
candidates that agree with the answer, and for every depth how many candidates stand ahead of them.

Legend: B sequences, R rounds, C candidates, D depth.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.decoding import DraftTree, Sampling
from specdec.decoding.round import DraftedRound
from specdec.drafter import Drafter
from specdec.evaluation.tuning.shape import Shape, candidates, deepest
from specdec.evaluation.tuning.survey import Survey
from specdec.target import Target

BATCH = 8
AHEAD = 1 << 30  # more than any tree has nodes


class Text(NamedTuple):
    """One prompt's greedy answer and what was drafted at each of its places."""

    ids: list[int]
    """New tokens up to an end token; without one, some more than asked for, that the last drafts can be judged."""
    rounds: int
    """R: places from which decoding may have to go on."""
    ahead: dict[int, Tensor]
    """By width, (R, D, D) int64: at a place, for the answer's k-th token among the candidates, how many of those down
    to depth d stand ahead of it, at ``[k - 1, d - 1]``."""


class Acceptance(NamedTuple):
    """Of one shape over all answers."""

    tokens: int  # committed by target passes
    passes: int

    @property
    def length(self) -> float:
        """Tokens per target pass, the bonus token included; 1 with no pass at all."""
        return self.tokens / self.passes if self.passes else 1.0


class Profile(NamedTuple):
    """A drafter's acceptance on some prompts."""

    texts: list[Text]
    widths: tuple[int, ...]

    def acceptance(self, shape: Shape) -> Acceptance:
        """Replay decoding with a shape of one of the widths."""
        tokens = passes = 0
        for text in self.texts:
            kept_RD = text.ahead[shape.top_k][:, : shape.depth, shape.depth - 1] < shape.nodes
            accepted = kept_RD.sum(1).tolist()
            place = 0
            while place < text.rounds:
                committed = min(accepted[place] + 1, len(text.ids) - 1 - place)
                place += committed
                tokens += committed
                passes += 1
        return Acceptance(tokens, passes)


@torch.inference_mode()
def measure_profile(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    widths: tuple[int, ...],
    *,
    end: Sequence[int] = (),
    on_prompts: Callable[[int], None] = lambda count: None,
) -> Profile:
    """Decode the prompts greedily, eagerly, eight side by side, and draft at every place.

    Args:
        prompts: token ids, each checked by :func:`specdec.decoding.check_length`.
        end: end tokens.
        on_prompts: told how many are done, group by group.
    """
    texts: list[Text] = []
    for start in range(0, len(prompts), BATCH):
        group = prompts[start : start + BATCH]
        texts += _group(target, drafter, group, max_new_tokens, widths, set(end))
        on_prompts(len(group))
    return Profile(texts, widths)


def _group(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    widths: tuple[int, ...],
    end: set[int],
) -> list[Text]:
    longest = max(map(len, prompts))
    survey = Survey(widths=widths)
    further = max(map(deepest, widths))
    most = target.config.max_position_embeddings
    if target.most_slots is not None:
        most = min(most, target.most_slots - survey.nodes_drafted - 1)
    further = max(0, min(further, most - longest - max_new_tokens))
    round_ = DraftedRound(target, drafter, survey, Sampling(), longest + max_new_tokens + further, len(prompts))
    answers = [round_.prefill(b, prompt, 0).tolist() for b, prompt in enumerate(prompts)]
    for _ in range(max_new_tokens - 1):
        _extend(answers, round_.verify(round_.draft()))
        if all(end.intersection(ids) for ids in answers):
            break
    for _ in range(further):
        _extend(answers, round_.verify(DraftTree.of_roots(round_.sequences.root_B.clone())))
    texts = []
    for b, ids in enumerate(answers):
        stop = next((place for place, token in enumerate(ids) if token in end), None)
        ids = ids if stop is None else ids[: stop + 1]
        rounds = max_new_tokens - 1 if stop is None else min(stop, max_new_tokens - 1)
        texts.append(Text(ids, rounds, {k: ahead(k, survey, b, ids, rounds) for k in widths}))
    return texts


def _extend(answers: list[list[int]], report: Tensor) -> None:
    for ids, (_, token, *_) in zip(answers, report.tolist(), strict=True):
        ids.append(token)


def ahead(top_k: int, survey: Survey, b: int, ids: list[int], rounds: int) -> Tensor:
    """``Text.ahead`` of one width, for sequence ``b`` and the first rounds of its answer ``ids``."""
    depth, columns = deepest(top_k), torch.arange(candidates(top_k))
    out_RDD = torch.full((rounds, depth, depth), AHEAD)
    if not rounds:
        return out_RDD
    tokens_RC, parents_RC, values_RC = (
        torch.stack([part[b] for part in parts]) for parts in zip(*survey.seen[top_k][:rounds], strict=True)
    )
    answer = torch.tensor(ids + [-1] * depth)  # no draft is -1
    node_R1 = torch.full((rounds, 1), -1)
    for k in range(depth):
        next_R1 = answer[k + 1 :][:rounds, None]
        found_RC = (parents_RC == node_R1) & (tokens_RC == next_R1)
        here_R1 = found_RC.any(1, keepdim=True)
        node_R1 = torch.where(here_R1, found_RC.int().argmax(1, keepdim=True), -2)  # nobody's parent
        value_R1 = values_RC.gather(1, node_R1.clamp_min(0))
        ahead_RC = (values_RC > value_R1) | ((values_RC == value_R1) & (columns < node_R1))
        for d in range(k, depth):
            count_R = ahead_RC[:, : top_k + d * top_k**2].sum(1)
            out_RDD[:, k, d] = torch.where(here_R1[:, 0], count_R, AHEAD)
    return out_RDD
