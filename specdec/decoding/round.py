"""One round of B sequences: draft, verify, accept, commit. Only a shape may wait for the device.

Legend: B sequences, N tree nodes with the root, P path nodes at most, L aux layers (N in drafter and target),
H hidden, T tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specdec.decoding.accept import DraftTree, Greedy, Sampling, ancestors, nodes_in_order
from specdec.decoding.proposal import Proposer
from specdec.decoding.sampling import NO_NOISE, acceptance_noise
from specdec.decoding.shapes import ChildSampling, DraftShape
from specdec.drafter import Drafter
from specdec.drafting.mode import Frontier
from specdec.nn.view import View
from specdec.target import Target, TargetOutput


class PlainRound(nn.Module):
    """A target pass for each token: a tree of the root alone; and the state of B sequences, updated in place.

    A sequence that is not live takes part in the arithmetic, for the shapes' sake, and in nothing else.

    A module, because a compiled graph takes what it reaches through one for tensors that stay where they are, so that
    CUDA graphs may write to them.

    Args:
        longest: tokens of the longest sequence, prompt and answer.
    """

    name = "plain decoding"
    nodes = 1
    longest_path = 1  # nodes, the root's included
    sizes: Sequence[int] = (1,)  # see DraftShape.sizes
    in_order = True  # whether paths are the first nodes of their trees
    aux_layers: tuple[int, ...] = ()  # the target's boundaries that a drafter reads
    final_norm = False

    def __init__(self, target: Target, sampling: Sampling, longest: int, batch: int = 1) -> None:
        super().__init__()
        self.target = target
        self.sampling = sampling
        self.rule = sampling.without_drafts
        self.capacity = longest + self.nodes
        self.cache = target.new_cache(self.capacity, batch, self.nodes)
        zero_B = torch.zeros(batch, dtype=torch.int64, device=target.device)
        self.live_B = zero_B.bool()
        self.seed_B = zero_B.clone()
        self.length_B = zero_B.clone()  # tokens in the target's cache
        self.root_B = zero_B.clone()  # the last committed token, which is in no cache yet
        # the tokens that the last pass committed, the root last; what follows is padding
        self.fresh_BP = zero_B[:, None].repeat(1, self.longest_path)
        self.count_B = zero_B.clone()  # how many they are; 0 if not live
        # the target's states before each of them
        self.aux_BPLH = zero_B.new_zeros(
            batch, self.longest_path, len(self.aux_layers), target.hidden_size, dtype=target.dtype
        )

    @property
    def models(self) -> list[nn.Module]:
        """The models that a round calls."""
        return [self.target.model]

    def prefill(self, b: int, prompt: list[int], seed: int) -> Tensor:
        """Start sequence ``b`` on a prompt; returns its first new token, (1,)."""
        out = self.read_prompt(b, prompt)
        logits_1V = self.target.logits(out.final_BTH[:, -1:])[:, 0]
        self.live_B[b] = True
        self.length_B[b] = len(prompt)
        self.count_B[b] = 1
        self.seed_B[b] = seed
        place_1 = self.length_B[b : b + 1]
        root_1 = self.sampling.draw(logits_1V, self.seed_B[b : b + 1], place_1)
        self.root_B[b : b + 1] = self.fresh_BP[b, :1] = root_1
        self.aux_BPLH[b, :1] = out.aux_BTNH[0, -1:]
        return root_1

    def read_prompt(self, b: int, prompt: list[int]) -> TargetOutput:
        """Run the target on a prompt; returns the states of the tokens that were run, the last one's among them."""
        return self.read_chain(b, prompt, 0)

    def read_chain(self, b: int, ids: list[int], first: int) -> TargetOutput:
        """Run the target on tokens behind the first ones of sequence ``b``, whose keys are in its slots."""
        ids_1T = torch.tensor([ids], device=self.target.device)
        first_1 = torch.full_like(ids_1T[0, :1], first)
        with self.cache.begin(b) as cache:
            view = View.chain(first_1, len(ids), self.capacity, cache)
            return self.run_target(ids_1T, view)

    def run_target(self, ids_BT: Tensor, view: View) -> TargetOutput:
        """Run the target on nodes, for their last states and those at the boundaries that somebody reads."""
        return self.target.forward(ids_BT, view, self.aux_layers, self.final_norm)

    def end(self, b: int) -> None:
        """Sequence ``b`` is done; its slots are free."""
        self.live_B[b] = False
        self.length_B[b] = 0
        self.count_B[b] = 0

    def draft(self) -> DraftTree:
        """Return the tree to verify: here the roots alone, copied, since they change while the tree is verified."""
        return DraftTree(self.root_B[:, None].clone(), torch.zeros_like(self.root_B)[:, None])

    def verify(self, tree: DraftTree) -> Tensor:
        """Verify, accept and commit; the target is asked once about all nodes.

        Returns:
            (B, P + 2) int64, all that the host must know: how many tokens are committed, the tokens, how deep the
            proposal was.
        """
        length_B = self.length_B
        tokens_BN = tree.tokens_BN
        # verify: every node sees the committed prefix and its own ancestors
        ancestors_BNN = ancestors(tree.parents_BN)
        depth_BN = ancestors_BNN.sum(-1) - 1  # the root's is 0
        view = View.append(length_B, ancestors_BNN, depth_BN, self.capacity, self.cache)
        out = self.run_target(tokens_BN, view)
        # greedy acceptance needs no probabilities: their argmax is that of the logits
        p_BNV = self.target.logits(out.final_BTH)
        noise = NO_NOISE
        if not isinstance(self.rule, Greedy):
            p_BNV = self.sampling.probs(p_BNV)
            noise = acceptance_noise(
                self.seed_B, length_B, tokens_BN.shape[1], self.longest_path, p_BNV.shape[-1]
            )
        # accept: a path from the root, and the target's own token after it
        accepted = self.rule.accept(tree, p_BNV, noise)
        nodes_BP = nodes_in_order(accepted.path_BN, self.longest_path)
        taken_B = accepted.path_BN.sum(-1)
        # the tokens after each node of the path, which are the drafts on it and then the target's own
        order_P = torch.arange(self.longest_path, device=tokens_BN.device)
        next_B1 = accepted.next_B[:, None]
        shifted_BP = torch.cat([tokens_BN.gather(1, nodes_BP)[:, 1:], next_B1], 1)
        fresh_BP = torch.where(order_P < taken_B[:, None] - 1, shifted_BP, next_B1)
        count_B = taken_B * self.live_B
        # commit: a chain's keys are in place, and recurrent states go back; a path's keys move to where the next pass
        # looks for them
        if self.in_order:
            self.cache.rewind(taken_B)
        else:
            self.cache.commit(length_B, nodes_BP)
        self.length_B.add_(count_B)
        self.count_B.copy_(count_B)
        self.fresh_BP.copy_(fresh_BP)
        last_B1 = (count_B - 1).clamp_min(0)[:, None]
        self.root_B.copy_(fresh_BP.take_along_dim(last_B1, 1)[:, 0])
        self.aux_BPLH.copy_(out.aux_BTNH.take_along_dim(nodes_BP[..., None, None], 1))
        return torch.cat([count_B[:, None], fresh_BP, depth_BN.amax(1, keepdim=True)], 1)


class SpeculativeRound(PlainRound):
    """A target pass for each draft tree."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        shape: DraftShape,
        sampling: Sampling,
        longest: int,
        batch: int = 1,
    ) -> None:
        # before the base, which sizes its buffers by these
        self.nodes = shape.nodes_drafted + 1
        self.longest_path = min(shape.depth, shape.nodes_drafted) + 1
        self.sizes = shape.sizes
        self.name = shape.name
        self.in_order = shape.in_order
        self.aux_layers = drafter.config.aux_layers
        self.final_norm = drafter.config.fusion.final_norm
        super().__init__(target, sampling, longest, batch)
        self.rule = sampling.acceptance
        self.proposer = Proposer(drafter, shape, longest, batch)

    @property
    def models(self) -> list[nn.Module]:
        return [self.target.model, self.proposer.drafter]

    def read_prompt(self, b: int, prompt: list[int]) -> TargetOutput:
        out = super().read_prompt(b, prompt)
        # row i pairs feature i with token i + 1, which the last token does not have yet
        if len(prompt) > 1:
            ids_1T = torch.tensor([prompt[1:]], device=self.target.device)
            self.proposer.prefill(b, ids_1T, out.aux_BTNH[:, :-1])
        return out

    def draft(self) -> DraftTree:
        return self.proposer.propose(
            self.length_B, self.root_B, self.extend(), self.child_sampling()
        )

    def extend(self) -> Frontier:
        """The drafter reads what was committed last, with the target's true features, and says what may follow."""
        # the drafter has not read what was committed last
        return self.proposer.extend(
            self.length_B - self.count_B, self.fresh_BP, self.aux_BPLH, self.count_B
        )

    def expand(self, start: Frontier, *level: Tensor) -> Frontier:
        """Draft one level; see :data:`specdec.drafting.mode.Expand`."""
        expand = self.proposer.drafting.expand(self.proposer.memory, start, self.length_B)
        return expand(*level)

    def child_sampling(self) -> ChildSampling:
        """How the drafts of this pass are found."""
        temperature = self.sampling.draft_temperature or self.sampling.temperature or 1.0
        return ChildSampling(self.rule, temperature, self.seed_B, self.length_B)
