"""Prompts that methods learn from before anything is measured."""

from collections.abc import Callable, Mapping, Sequence

from outpace.api import Model
from outpace.core.params import SamplingParams
from outpace.data.workload import WorkItem


def warm_up(
    model: Model,
    methods: Mapping[str, int | None],
    items: Sequence[WorkItem],
    params: SamplingParams,
    on_item: Callable[[], None] = lambda: None,
) -> None:
    """Let every method decode the first turn of every item, for what it learns from it.

    Args:
        model: the model.
        methods: with the budget of each, None for its own.
        items: prompts.
        params: sampling parameters.
        on_item: called after each item.
    """
    for item in items:
        prompt = model.encode(item.prompt(0, []))
        for method, budget in methods.items():
            model.generate(prompt, params, method=method, budget=budget)
        on_item()
