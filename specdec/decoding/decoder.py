"""The host loop: propose, verify, accept, commit.

Legend: N tree nodes with the root, P path nodes.
"""

import time
from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

import torch

from specdec.decoding.growth import Growth
from specdec.decoding.proposer import Proposer
from specdec.decoding.sampling import Chance, Sampling
from specdec.drafter import Drafter
from specdec.nn.view import View
from specdec.target import Target
from specdec.timers import timer

GREEDY = Sampling()


class Generation(NamedTuple):
    """Tokens generated after a prompt, and how."""

    ids: list[int]  # new tokens, at most max_new_tokens, cut after an end token
    accepted: tuple[int, ...]  # per target pass: tokens committed less one, the bonus token or an accepted end token
    seconds: float  # wall time of the whole call, prompt included
    context: tuple[int, ...] = ()  # per target pass: tokens committed before it, the prompt's included
    draft_ms: tuple[float, ...] = ()  # per target pass: drafting for it
    verify_ms: tuple[float, ...] = ()  # per target pass: the pass, its acceptance and its commit


def check_pair(target: Target, drafter: Drafter) -> None:
    """Raise ValueError unless the drafter was made for a target of this shape."""
    config = drafter.config
    for what, has, wants in (
        ("hidden size", target.hidden_size, config.target_hidden_size),
        ("vocabulary size", target.vocab_size, config.vocab_size),
        ("number of layers", target.num_layers, config.num_target_layers),
    ):
        if has != wants:
            raise ValueError(
                f"drafter and target do not match: the target's {what} is {has}, the drafter was made for {wants}"
            )
    weight = drafter.lm_head.weight
    if (weight.dtype, weight.device) != (target.dtype, target.device):
        raise ValueError(
            f"the drafter is {weight.dtype} on {weight.device}, the target {target.dtype} on {target.device}: "
            "load both alike"
        )


def check_length(target: Target, prompt: list[int], max_new_tokens: int) -> None:
    """Raise ValueError for a request that no decoding can serve."""
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token")
    if not 0 <= min(prompt) <= max(prompt) < target.vocab_size:
        raise ValueError(f"the prompt has token ids outside 0..{target.vocab_size - 1}: is the tokenizer the target's?")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    most = target.config.max_position_embeddings
    if len(prompt) + max_new_tokens > most:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones exceed the target's {most} positions"
        )


def _until_end(ids: list[int], end: Collection[int]) -> list[int]:
    for index, token in enumerate(ids):
        if token in end:
            return ids[: index + 1]
    return ids


class PlainDecoder:
    """The target alone, on the same static cache: what speculative decoding is compared with."""

    def __init__(self, target: Target, sampling: Sampling = GREEDY) -> None:
        self.target, self.sampling = target, sampling

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_new_tokens: int, end: Collection[int] = (), seed: int = 0) -> Generation:
        """Generate; stops after a token of ``end``.

        Args:
            seed: of this text; unread without chance.
        """
        check_length(self.target, prompt, max_new_tokens)
        begin = time.perf_counter()
        chance = Chance(self.sampling, seed, self.target.vocab_size, self.target.device)
        chance.see(prompt)
        capacity = len(prompt) + max_new_tokens
        cache = self.target.new_cache(capacity)
        feed, length, ids = torch.tensor([prompt], device=self.target.device), 0, []
        while True:
            view = View.chain(torch.tensor(length, device=feed.device), feed.shape[1], capacity, cache)
            out = self.target.forward(feed, view, ())
            length += feed.shape[1]
            feed = chance.draw(self.target.logits(out.final_BTH[:, -1:])[0], length)[None]
            ids.append(int(feed))
            chance.see(feed[0])
            if len(ids) == max_new_tokens or ids[-1] in end:
                return Generation(ids, (), time.perf_counter() - begin)


class SpeculativeDecoder:
    """Speculative decoding, one sequence at a time; the output is the target's own.

    Greedy, or with the rule ``one_hot``, it is plain decoding's output token for token, from the same seed; with the
    other rules it has plain decoding's law.

    Raises:
        ValueError: drafter and target do not match, or the rule cannot judge such a growth.
    """

    def __init__(self, target: Target, drafter: Drafter, growth: Growth, sampling: Sampling = GREEDY) -> None:
        check_pair(target, drafter)
        growth.check(drafter.config.draft_vocab_size)
        growth.check_rule(sampling.acceptance)
        self.target, self.drafter, self.growth, self.sampling = target, drafter, growth, sampling
        self.layers, self.final_norm = drafter.config.aux_layers, drafter.config.aux_final_norm

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_new_tokens: int, end: Collection[int] = (), seed: int = 0) -> Generation:
        """Generate; stops after a token of ``end``. See :meth:`PlainDecoder.generate`."""
        check_length(self.target, prompt, max_new_tokens)
        begin = time.perf_counter()
        chance = Chance(self.sampling, seed, self.target.vocab_size, self.target.device)
        chance.see(prompt)
        longest = len(prompt) + max_new_tokens
        capacity = longest + self.growth.nodes_drafted + 1
        cache = self.target.new_cache(capacity)
        proposer = Proposer(self.drafter, self.growth, longest + self.growth.depth)

        feed = torch.tensor([prompt], device=self.target.device)
        prefix = torch.zeros((), dtype=torch.int64, device=feed.device)
        out = self.target.forward(feed, View.chain(prefix, len(prompt), capacity, cache), self.layers, self.final_norm)
        root_1 = chance.draw(self.target.logits(out.final_BTH[:, -1:])[0], len(prompt))
        chance.see(root_1)
        new_P, aux_1PNH = torch.cat([feed[0, 1:], root_1]), out.aux_BTNH
        length, ids, accepted, context = len(prompt), [int(root_1)], [], []
        watch = timer(feed.device)
        marks = []

        while len(ids) < max_new_tokens and ids[-1] not in end:
            context.append(length + 1)
            marks.append(watch.mark())
            children = self.sampling.children(seed, length)
            tree = proposer.propose(root_1, proposer.extend(new_P, aux_1PNH), children)
            marks.append(watch.mark())
            ancestors_NN = tree.ancestors_NN()
            view = View.append(length, ancestors_NN, ancestors_NN.sum(-1) - 1, capacity, cache)
            out = self.target.forward(tree.tokens_N[None], view, self.layers, self.final_norm)
            logits_NV = self.target.logits(out.final_BTH)[0]
            drafts = tree.drafts(self.drafter.vocab)
            verdict = chance.judge(drafts, ancestors_NN, self.growth.depth + 1, logits_NV, length)
            path_P = verdict.path_BN[0].nonzero().flatten()
            new_P = torch.cat([tree.tokens_N[path_P[1:]], verdict.next_B])
            chance.see(new_P)
            cache.commit(length, path_P)
            marks.append(watch.mark())
            length, root_1, aux_1PNH = length + len(path_P), verdict.next_B, out.aux_BTNH[:, path_P]
            committed = _until_end(new_P.tolist(), end)
            accepted.append(len(committed) - 1)
            ids += committed
        spans = [1e3 * watch.seconds([span]) for span in pairwise(marks)]
        seconds = time.perf_counter() - begin
        draft_ms, verify_ms = tuple(spans[::3]), tuple(spans[1::3])  # every third is the host's, between passes
        return Generation(ids[:max_new_tokens], tuple(accepted), seconds, tuple(context), draft_ms, verify_ms)
