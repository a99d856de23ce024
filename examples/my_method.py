"""A method in one file: draft what followed the last token the last time it came (a bigram table per request).

It counts as installed once this file is in a package whose pyproject.toml has

    [project.entry-points."outpace.methods"]
    bigram = "my_package.my_method:BIGRAM"

and then works wherever a method is named: `outpace chat MODEL --method bigram:budget=4`.
"""

from collections.abc import Sequence

import torch

from outpace.methods import BaseProposer, BuildContext, DraftRequest, DraftTree, Method, Options


class Bigram(BaseProposer):
    def __init__(self, budget: int) -> None:
        self.budget = budget

    def propose(self, states: Sequence[None], requests: Sequence[DraftRequest]) -> list[DraftTree]:
        trees = []
        for request in requests:
            follower = dict(zip(request.ids, request.ids[1:]))  # later pairs win
            chain = [request.ids[-1]]
            while len(chain) <= min(request.budget, request.max_depth) and chain[-1] in follower:
                chain.append(follower[chain[-1]])
            trees.append(DraftTree.chain(torch.tensor(chain)))
        return trees


def build(options: Options, context: BuildContext) -> Bigram:
    return Bigram(4 if options.budget is None else options.budget)


BIGRAM = Method(build, "what followed the last token the last time")
