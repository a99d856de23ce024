"""Verification by match and by rejection, and its random primitives, bound to requests and their keyed noise."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outpace.core.events import TokenLogprob
from outpace.core.protocols import NO_TOKEN, NodeOutputs, SamplingContext, Verdict
from outpace.core.tree import DraftTree, Topology
from outpace.kernels.draw import draw_natively, draws_natively
from outpace.lib.places import places_of
from outpace.sampling.noise import Purpose, draw_key, gumbel, uniform
from outpace.sampling.warp import history_of, warp


def draw_keyed(
    rows: Sequence[Tensor], contexts: Sequence[SamplingContext], paths: Sequence[Sequence[int]]
) -> list[int]:
    """One token per row: argmax(log p + g) with the request's noise at the token's position.

    Args:
        paths: per row the tokens between node 0 and the token that is drawn.
    """
    drawn = [0] * len(rows)
    for params, members in places_of(context.params for context in contexts).items():
        histories = [history_of(contexts[row], paths[row]) for row in members] if params.has_processors else None
        log_probs = warp(torch.stack([rows[row] for row in members]), params, histories)
        tokens = _likeliest(log_probs, [draw_key(contexts[row], len(paths[row])) for row in members])
        if params.has_processors:
            tokens = tokens.where(log_probs.amax(dim=-1) > -torch.inf, NO_TOKEN)
        for row, token in zip(members, tokens.tolist(), strict=True):
            drawn[row] = token
    return drawn


def _likeliest(log_probs: Tensor, keys: Sequence[tuple[int, int]]) -> Tensor:
    """[R] argmax(log p + g) of each row [R, V]. Noise costs more than all other work on a row, so it is computed only
    for ids that some row may draw: truncation leaves few, and temperature 0 one."""
    may_be_drawn = (log_probs != -torch.inf).any(dim=0)  # NaN may be
    may_be_drawn[0] = True  # an argmax needs an id where none may be
    ids = may_be_drawn.nonzero()[:, 0]
    return ids[(log_probs[:, ids] + gumbel(keys, ids)).argmax(dim=-1)]


class BatchDraw:
    """The `draw` of `match` over a batch: greedy rows are read once, the others are drawn when visited, by the compiled
    kernels for requests whose only option is a temperature.

    Greedy requests with penalties, biases or bans are drawn too: their best token depends on the node's path.
    """

    def __init__(
        self,
        outputs: Sequence[NodeOutputs],
        topologies: Sequence[Topology],
        tokens: Sequence[Sequence[int]],
        contexts: Sequence[SamplingContext],
    ) -> None:
        self._outputs, self._topologies, self._tokens, self._contexts = outputs, topologies, tokens, contexts
        wanted = [context.params for context in contexts]
        greedy = [index for index, params in enumerate(wanted) if params.is_greedy and not params.has_processors]
        self._best: dict[int, list[int]] = {}
        if greedy:
            best = torch.cat([outputs[index].top_ids[:, 0] for index in greedy]).tolist()  # one host read
            for index in greedy:
                count = len(topologies[index])
                self._best[index], best = best[:count], best[count:]

    def __call__(self, queries: list[tuple[int, int]]) -> list[int]:
        freely = [query for query in queries if not self._is_masked_first(query[0])]
        drawn = dict(zip(freely, self._freely_drawn(freely), strict=True))
        return [self._allowed(query, drawn.get(query)) for query in queries]

    def _is_masked_first(self, index: int) -> bool:
        """Whether a draw needs the grammar's mask first: which tokens truncation leaves depends on it."""
        params = self._contexts[index].params
        is_truncated = not params.is_greedy and bool(params.top_k or params.top_p < 1 or params.min_p)
        return self._contexts[index].constraint is not None and is_truncated

    def _allowed(self, query: tuple[int, int], token: int | None) -> int:
        """The best token that a request's grammar allows: `token`, the best of all, if allowed; else the best under the
        mask."""
        index, node = query
        context = self._contexts[index]
        if context.constraint is None:
            assert token is not None
            return token
        path = self._path(index, node)
        generated = [*context.generated, *path]
        if token == NO_TOKEN or (token is not None and context.constraint.allows(generated, token)):
            return token
        row = masked(self._outputs[index].scores(node), context, path)
        return NO_TOKEN if row is None else draw_keyed([row], [context], [path])[0]

    def _freely_drawn(self, queries: list[tuple[int, int]]) -> list[int]:
        """Tokens as if there were no grammars."""
        visited = [query for query in queries if query[0] not in self._best]
        fast = [query for query in visited if self._is_fast(query[0])]
        slow = [query for query in visited if query not in fast] if fast else visited
        found = dict(zip(fast, self._drawn_fast(fast), strict=True)) if fast else {}
        found |= dict(zip(slow, self._drawn(slow), strict=True)) if slow else {}
        return [self._best[index][node] if index in self._best else found[index, node] for index, node in queries]

    def _is_fast(self, index: int) -> bool:
        return self._contexts[index].params.is_tempered and draws_natively(self._outputs[index])

    def _drawn_fast(self, visited: Sequence[tuple[int, int]]) -> list[int]:
        keys = [draw_key(self._contexts[index], self._topologies[index].depths[node]) for index, node in visited]
        rows = [(self._outputs[index], node) for index, node in visited]
        return draw_natively(rows, [self._contexts[index].params.temperature for index, _ in visited], keys)

    def _drawn(self, visited: Sequence[tuple[int, int]]) -> list[int]:
        rows = [self._outputs[index].scores(node) for index, node in visited]
        contexts, paths = [self._contexts[index] for index, _ in visited], [self._path(*query) for query in visited]
        return draw_keyed(rows, contexts, paths)

    def _path(self, index: int, node: int) -> list[int]:
        return path_tokens(self._topologies[index], self._tokens[index], node)


def masked(row: Tensor, context: SamplingContext, path: Sequence[int]) -> Tensor | None:
    """[V] logits after a node, -inf for tokens that the request's grammar forbids; None if it forbids all of them."""
    if context.constraint is None:
        return row
    allowed = context.constraint.mask([*context.generated, *path], len(row))
    if allowed is None:
        return row
    row = row.masked_fill(~allowed.to(row.device), -torch.inf)
    return row if row.amax() > -torch.inf else None


def path_tokens(topology: Topology, tokens: Sequence[int], node: int) -> list[int]:
    """Tokens of the nodes below node 0 down to `node`: what lies between the pending token and the node's successor."""
    return [tokens[above] for above in topology.path(node)[1:]]


class RejectionDraw:
    """The primitives of `rejection` for one request, on noise of their own."""

    def __init__(
        self, outputs: NodeOutputs, topology: Topology, tokens: Sequence[int], context: SamplingContext
    ) -> None:
        self._outputs, self._topology, self._tokens, self._context = outputs, topology, tokens, context

    def target_probs(self, node: int) -> Tensor:
        """[V] the target's warped distribution after a node; all 0 where the request's options leave no token."""
        params, path = self._context.params, path_tokens(self._topology, self._tokens, node)
        scores = self._outputs.scores(node)
        row = masked(scores, self._context, path)
        if row is None:
            return torch.zeros_like(scores)
        histories = [history_of(self._context, path)] if params.has_processors else None
        return warp(row[None], params, histories)[0].exp()

    def categorical(self, probs: Tensor, node: int) -> int:
        """A token drawn from `probs`; `NO_TOKEN` if all of them are 0."""
        if not probs.any():
            return NO_TOKEN
        key = draw_key(self._context, self._topology.depths[node], Purpose.RESIDUAL)
        return int(_likeliest(probs.log()[None], [key]))

    def bernoulli(self, probability: float, node: int) -> bool:
        # Keyed by the node too: siblings share a position and need independent noise.
        key = draw_key(self._context, self._topology.depths[node] - 1, Purpose.ACCEPT)
        return float(uniform([key], torch.tensor([node]))[0, 0]) < probability


Draw = Callable[[list[tuple[int, int]]], list[int]]
"""The categorical primitive: for each (tree, node) the target's token after that node."""


def match(topologies: Sequence[Topology], tokens: Sequence[Sequence[int]], draw: Draw) -> list[Verdict]:
    """Walk each tree along the tokens that the target itself draws.

    Exact for any proposal and needs no draft probabilities: an emitted token is always the target's own draw, so
    with keyed noise the output equals plain decoding seed for seed. Trees of a batch are walked level by level, so
    that one draw serves all of them and rejected branches cost no sampling.
    """
    paths: list[list[int]] = [[0] for _ in topologies]
    next_tokens = [-1] * len(topologies)
    walking = list(range(len(topologies)))
    while walking:
        drawn = draw([(tree, paths[tree][-1]) for tree in walking])
        followed = []
        for tree, token in zip(walking, drawn, strict=True):
            children = topologies[tree].children[paths[tree][-1]]
            child = next((node for node in children if tokens[tree][node] == token), None)
            if child is None:
                next_tokens[tree] = token
            else:
                paths[tree].append(child)
                followed.append(tree)
        walking = followed
    return [Verdict(tuple(path), token) for path, token in zip(paths, next_tokens, strict=True)]


def rejection(
    tree: DraftTree,
    tokens: Sequence[int],
    target_probs: Callable[[int], Tensor],
    categorical: Callable[[Tensor, int], int],
    bernoulli: Callable[[float, int], bool],
) -> Verdict:
    """Accept or reject the children of each node in turn, then draw from the target's residual distribution.

    A child drawn from q is accepted with probability min(1, p(x) / q(x)); after a rejection p becomes
    norm(max(p - q, 0)), and q, for the next child, what x leaves of it (recursive rejection sampling of siblings drawn
    without replacement, arXiv 2402.14160; one child is the classic rule of Leviathan et al. 2023). A
    point-mass draft is the case q = 1 at its token: accept with p(x), else drop x from p. The emitted distribution
    equals the target's for any q that the tokens were drawn from. Children whose remaining probability is 0, because q
    is exhausted or by rounding, are skipped: the others were drawn from the rest of q. So are all of a q that is NaN,
    as a drafter's logits that overflow make it.

    Args:
        tree: the proposal; `tree.draft_probs` at a node is the q of its children.
        target_probs: the target's warped distribution [V] at a node; called only for nodes on the path.
        categorical: of probabilities [V] and a node, a token drawn from them.
        bernoulli: of a probability and a drafted node, whether to accept it; independent of `categorical`, or the
            residual is biased.

    Raises:
        ValueError: a first child has probability 0 under the distribution it claims to come from.
    """
    distributions = tree.draft_probs or {}
    path = [0]
    while True:
        node = path[-1]
        remaining = target_probs(node)  # [V]
        distribution = distributions.get(node)
        for child in tree.topology.children[node]:
            token = tokens[child]
            draft_prob = 1.0 if distribution is None else float(distribution[token])
            if distribution is not None and not draft_prob > 0.0:
                if distribution is distributions[node] and (distribution > 0).any():
                    raise ValueError(
                        f"node {child}: token {token} has draft probability {draft_prob}, so it was not drawn from it"
                    )
                continue
            if bernoulli(min(1.0, float(remaining[token]) / draft_prob), child):
                path.append(child)
                break
            if distribution is None:
                left = _without(remaining, token)
            else:
                left, distribution = (
                    _normalised(torch.clamp(remaining - distribution.to(remaining), min=0.0)),
                    _without(distribution, token),
                )
            # p == q up to rounding leaves nothing: the rejection itself was rounding, and p is the distribution to draw
            # from.
            remaining = left if left.any() else remaining
        else:
            return Verdict(tuple(path), categorical(remaining, node))


def _without(distribution: Tensor, token: int) -> Tensor:
    rest = distribution.clone()
    rest[token] = 0.0
    return _normalised(rest)


def _normalised(weights: Tensor) -> Tensor:
    """The distribution with these weights; all 0 where they are."""
    total = weights.sum()
    return weights / total if total > 0 else weights


def token_logprobs(
    outputs: NodeOutputs, nodes: Sequence[int], tokens: Sequence[int], count: int
) -> tuple[TokenLogprob, ...]:
    """Log-probability of each token, before temperature, truncation and every other option.

    That is vLLM's default, `logprobs_mode="raw_logprobs"`.
    """
    log_probs = torch.log_softmax(torch.stack([outputs.scores(node) for node in nodes]), dim=-1)  # [P, V]
    chosen = log_probs.gather(-1, torch.tensor(tokens, device=log_probs.device)[:, None])  # [P, 1]
    ranks = ((log_probs > chosen).sum(dim=-1) + 1).tolist()
    values, ids = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)  # [P, count]
    rows = zip(tokens, chosen[:, 0].tolist(), ranks, ids.tolist(), values.tolist(), strict=True)
    return tuple(
        TokenLogprob(token, logprob, rank, tuple((i, v) for i, v in zip(best, best_values) if v > -torch.inf))
        for token, logprob, rank, best, best_values in rows
    )
