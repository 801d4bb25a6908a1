"""One round of B sequences: propose, verify, accept, commit. Only a confident chain's drafting waits for the device.

Legend: B sequences, N tree nodes with the root, P path nodes at most, V vocabulary.
"""

import torch
from torch import Tensor, nn

from specdec.decoding.growth import Growth
from specdec.decoding.prompt import Part
from specdec.decoding.proposer import Proposer
from specdec.decoding.rules import Drafts, ancestors
from specdec.decoding.sampling import Sampling
from specdec.decoding.sequences import Sequences
from specdec.decoding.tree import DraftTree
from specdec.drafter import Drafter
from specdec.nn.view import View
from specdec.target import Target


class PlainRound:
    """A target pass for each token: a tree of the root alone.

    Args:
        longest: tokens of the longest sequence, prompt and answer.
    """

    nodes, path = 1, 1
    drafts_fixed = False  # whether drafting has the same shape in every round, and is worth a graph
    in_order = True  # whether paths are the first nodes of their trees
    drafter_slots = (0, 0)  # key slots of the drafter's cache, and how many beyond a sequence may be in use
    layers: tuple[int, ...] = ()
    final_norm = False

    def __init__(self, target: Target, sampling: Sampling, longest: int, batch: int = 1) -> None:
        self.target = target
        self.modules: list[nn.Module] = [target.model]
        self.capacity = longest + self.nodes
        self.sequences = Sequences.empty(target, sampling, self.capacity, batch, self.path, len(self.layers))

    @property
    def tensors(self) -> list[Tensor]:
        """What stays from round to round and is updated in place; a target's keys only once there are some."""
        return self.sequences.tensors

    def prefill(self, b: int, prompt: list[int], seed: int) -> Tensor:
        """Start sequence ``b`` on a prompt; returns its first new token, (1,)."""
        return self.begin(b, prompt, seed, *self.read_whole(b, prompt))

    def read_whole(self, b: int, prompt: list[int]) -> tuple[Tensor, Tensor]:
        """:meth:`read` of all of a prompt at once."""
        return self.read(b, Part.whole(prompt, self.target.device))

    def read(self, b: int, part: Part, columns: int | None = None) -> tuple[Tensor, Tensor]:
        """Read a part of sequence ``b``'s prompt; what its last token says: logits (1, V), and states (1, N, H).

        Args:
            columns: of the target's key slots and of the drafter's; as in :meth:`draft`.
        """
        cache = self.sequences.cache.row(b)
        view = View.chain(part.first_1, part.ids_1T.shape[1], columns or self.capacity, cache)
        out = self.target.forward(part.ids_1T, view, self.layers, self.final_norm)
        self._read_drafter(b, part, out.aux_BTNH[:, : part.after_1M.shape[1]], columns)
        logits_11V = self.target.logits(out.final_BTH.take_along_dim(part.last_11[..., None], 1))
        return logits_11V[:, 0], out.aux_BTNH.take_along_dim(part.last_11[..., None, None], 1)[0]

    def begin(self, b: int, prompt: list[int], seed: int, logits_1V: Tensor, aux_1NH: Tensor) -> Tensor:
        """Start sequence ``b`` on a prompt that has been read; returns its first new token, (1,)."""
        sequences, chance = self.sequences, self.sequences.chance.row(b)
        chance.begin(prompt, seed)
        root_1 = chance.draw(logits_1V, chance.seed_B.new_full((1,), len(prompt)))
        chance.see(root_1[None])
        sequences.begin(b, len(prompt), root_1, aux_1NH)
        return root_1

    def draft(self, columns: int | None = None) -> DraftTree:
        """What to verify.

        Args:
            columns: how many of the drafter's key slots to look at: no sequence has any use for the others yet. None
                for all.
        """
        return DraftTree.of_roots(self.sequences.root_B.clone())  # the roots change while the tree is verified

    def verify(self, tree: DraftTree) -> Tensor:
        """Verify and commit; (B, P + 2) int64: how many tokens are committed, the tokens, how deep the proposal was."""
        report = self.judge(tree)
        self.tidy()
        return report

    def tidy(self) -> None:
        """Move the target's keys of what was committed last to where the next verification looks for them."""
        if not self.in_order:
            self.sequences.tidy()

    def judge(self, tree: DraftTree, columns: int | None = None) -> Tensor:
        """Verification without the tidying after it.

        Args:
            columns: of the target's key slots; as in :meth:`draft`.
        """
        sequences = self.sequences
        length_B, tokens_BN = sequences.length_B, tree.tokens_BN
        ancestors_BNN = ancestors(tree.parents_BN)
        depth_BN = ancestors_BNN.sum(-1) - 1  # 0 of padding
        view = View.append(length_B, ancestors_BNN, depth_BN, columns or self.capacity, sequences.cache)
        out = self.target.forward(tokens_BN, view, self.layers, self.final_norm)
        logits_BNV = self.target.logits(out.final_BTH)
        verdict = sequences.chance.judge(self._drafts(tree), ancestors_BNN, self.path, logits_BNV, length_B)
        order_P = torch.arange(self.path, device=tokens_BN.device)
        taken_B = verdict.path_BN.sum(-1)
        nodes_BP = _nodes_in_order(verdict.path_BN, order_P)
        after_BP = tokens_BN.gather(1, nodes_BP)[:, 1:]
        next_B1 = verdict.next_B[:, None]
        fresh_BP = torch.where(order_P < taken_B[:, None] - 1, torch.cat([after_BP, next_B1], 1), next_B1)
        count_B = taken_B * sequences.live_B
        sequences.advance(nodes_BP, count_B, fresh_BP, out.aux_BTNH)
        return torch.cat([count_B[:, None], fresh_BP, depth_BN.amax(1, keepdim=True)], 1)

    def _read_drafter(self, b: int, part: Part, aux_1MNH: Tensor, columns: int | None) -> None:
        """The same for the drafter, as far as there are tokens after its own."""

    def _drafts(self, tree: DraftTree) -> Drafts:
        return Drafts(tree.tokens_BN, tree.parents_BN)


class DraftedRound(PlainRound):
    """A target pass for each draft tree."""

    def __init__(
        self, target: Target, drafter: Drafter, growth: Growth, sampling: Sampling, longest: int, batch: int = 1
    ) -> None:
        self.nodes, self.path = growth.nodes_drafted + 1, min(growth.depth, growth.nodes_drafted) + 1
        self.drafts_fixed, self.in_order = growth.fixed, growth.in_order
        self.layers, self.final_norm = drafter.config.aux_layers, drafter.config.aux_final_norm
        super().__init__(target, sampling, longest, batch)
        self.modules.append(drafter)
        self.proposer = Proposer(drafter, growth, longest + growth.depth, batch)
        self.drafter_slots = (self.proposer.capacity, self.proposer.beyond)

    @property
    def tensors(self) -> list[Tensor]:
        return [*super().tensors, *self.proposer.cache.tensors]

    def draft(self, columns: int | None = None) -> DraftTree:
        sequences = self.sequences
        length_B, count_B = sequences.length_B, sequences.count_B
        start = self.proposer.extend(length_B - count_B, sequences.fresh_BP, sequences.aux_BPNH, count_B, columns)
        children = sequences.chance.sampling.children(sequences.chance.seed_B, length_B)
        return self.proposer.propose(length_B, sequences.root_B, start, children, columns)

    def _read_drafter(self, b: int, part: Part, aux_1MNH: Tensor, columns: int | None) -> None:
        if part.after_1M.shape[1]:
            self.proposer.prefill(b, part.after_1M, aux_1MNH, part.first_1, columns)

    def _drafts(self, tree: DraftTree) -> Drafts:
        return tree.drafts(self.proposer.drafter.vocab)


def _nodes_in_order(path_BN: Tensor, order_P: Tensor) -> Tensor:
    """The nodes of each path, (B, P) int64; behind its end the nodes ``order_P``, or the last one."""
    B, N = path_BN.shape
    P = len(order_P)
    order_N = torch.arange(N, device=path_BN.device)
    place_BN = (path_BN[:, None] & (order_N < order_N[:, None])).sum(-1)  # cumsum would call a library in compiled code
    step_BN = torch.where(path_BN, place_BN, P)  # those off the path go to a column past the end
    rest_BW = torch.cat([order_P, order_P[:1]]).clamp_max(N - 1).repeat(B, 1)
    nodes_BN = order_N.expand(B, N)
    return rest_BW.scatter(1, step_BN, nodes_BN)[:, :P]
