"""Our methods inside vLLM, as its `custom_class` proposer: one class for any method that has a linear form.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "model": "outpace.vllm.proposer.Method",
        "num_speculative_tokens": 7}' --additional-config '{"outpace": {"method": "graft", "drafter": "run/eagle3"}}'

Settings are the object "outpace" of vLLM's `additional_config` (`vllm.settings.ProposerSettings`), which vLLM hands to
every worker and node.

vLLM verifies chains only, so the best chain of each tree is drafted, up to the depth at which a further token has no
expected gain (`trees.linear_form`). Drafts are chosen, not drawn: vLLM accepts them with the target's own probability,
so that the distribution of the answers is unchanged.

The cost of a row of a pass is measured, unless `least_gain` is set, and so is whether drafting raises the throughput of
batches. With tensor parallelism no measured time decides: drafts depend only on the ids and on earlier rounds, so that
all ranks draft the same; vLLM verifies the first rank's.

If anything fails while serving, one error is logged and decoding continues without drafts.
"""

import logging
from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

from outpace.budget.costs import LEAST_GAIN, RowPrice
from outpace.budget.decisions import RoundRates
from outpace.drafters.build_context import BuildContext
from outpace.lib.errors import InvalidRequest
from outpace.methods.catalog import build_proposer
from outpace.trees.linear_form import LinearForm
from outpace.vllm.borrowed import BorrowedTarget, build_context
from outpace.vllm.capture import Capture, TargetPass
from outpace.vllm.host import check_graphs, check_host, check_inputs, check_parallel, draft_to_the_end, ending_ids
from outpace.vllm.rounds import Rounds
from outpace.vllm.settings import KEY, check_drafts, linear_method, read_settings

LOG = logging.getLogger("vllm.outpace")  # below vLLM's own, which it has set up
MOST_SLOTS = 64
"""Maximal slots of a trained drafter, each with keys and values, unless `slots` is set."""
MOST_ROWS = 1 << 18
"""On a GPU, tokens of all these slots together: their memory is taken at once, and vLLM's cache gets the rest."""


class MethodProposer:
    """A proposer with the interface that vLLM calls.

    Raises:
        InvalidRequest: a setting or method is unknown or cannot draft here, or vLLM runs in a way that hides the states
            it needs; with the remedy.
        ModelError: a vLLM that this was not tested with.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        self._settings = read_settings(vllm_config.additional_config)
        text = self._settings.method
        if text is None:
            raise InvalidRequest('name a method: additional_config={"outpace": {"method": "..."}}')
        self._spec = linear_method(text, self._settings.drafter)
        check_drafts(vllm_config.speculative_config.num_speculative_tokens, "num_speculative_tokens")
        check_parallel(vllm_config)
        check_inputs(vllm_config)
        check_host()
        draft_to_the_end(vllm_config)
        self._capture: Capture | None = None
        self._rounds: Rounds | None = None
        self._proposer: LinearForm | None = None
        self._price: RowPrice | None = None
        self._rates, self._last = RoundRates(), (0, 0.0)  # of the last step: number of requests, and its end

    def load_model(self, target_model: Any) -> None:
        """Build the drafter, and wrap the target to capture its passes."""
        check_graphs(self._config)
        config, settings, spec = self._config, self._settings, self._spec
        model, text_config = config.model_config, config.model_config.hf_text_config
        ranks = config.parallel_config.tensor_parallel_size
        device = next(target_model.parameters()).device
        target: Any = text_config
        if spec.drafter is not None:
            target = BorrowedTarget(target_model, text_config, model.max_model_len, MOST_SLOTS, ranks)
        context = build_context(spec, settings, target, device)
        slots = self._slots(context)
        if context.target is not None:
            context.target.max_slots = slots
        built = build_proposer(spec, context)
        least_gain = LEAST_GAIN if settings.least_gain is None else settings.least_gain
        self._proposer = proposer = LinearForm(built, least_gain)
        self._price = RowPrice() if settings.least_gain is None and ranks == 1 else None
        self._capture = Capture(proposer.needs, text_config.num_hidden_layers)
        self._capture.install(target_model)
        if proposer.needs.taps:  # vLLM's cache must not return a model that was compiled without taps
            config.additional_config[f"{KEY}_taps"] = list(proposer.needs.taps)
        self._rounds = Rounds(
            proposer,
            slots,
            model.max_model_len,
            config.speculative_config.num_speculative_tokens,
            ending_ids(text_config),
        )

    def _slots(self, context: BuildContext) -> int:
        """Number of requests with drafts at a time."""
        requests = most = int(self._config.scheduler_config.max_num_seqs)
        if context.net is not None:
            most = MOST_SLOTS
            positions = getattr(context.net().config, "positions", None)  # of nets with keys and values
            if positions is not None and context.device.type != "cpu":
                longest = min(int(positions), self._config.model_config.max_model_len)
                most = max(min(most, MOST_ROWS // longest), 1)
        return min(self._settings.slots or most, requests)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts of each row of the batch, which may be none. Called by vLLM after each step.

        Args:
            sampled_token_ids: new ids of each row; empty while its prompt is being written.
            num_tokens_no_spec: [rows] ids of each row, the new ones included.
            token_ids_cpu: [rows, max_model_len] these ids.
        """
        none: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._rounds is None or self._capture is None:
            return none
        try:
            seen = self._capture.take()
            if self._capture.fault is not None:
                raise self._capture.fault
            began = perf_counter()
            pays = self._price is None or self._pays(sampled_token_ids, seen, began)
            drafts = self._rounds.step(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, seen, pays)
            if self._price is not None and seen is not None:
                self._learn_price(self._price, sampled_token_ids, seen, began)
            return drafts
        except Exception:
            self._rounds = None  # its state may be inconsistent
            LOG.exception("outpace: method %s failed; decoding goes on without drafts", self._spec)
            return none

    def _pays(self, sampled: Sequence[Sequence[int]], seen: TargetPass | None, began: float) -> bool:
        """Whether to draft for the next step: for a single request always, for several if drafting has raised the
        throughput."""
        count, (before, last) = len(sampled), self._last
        self._last = count, began
        if seen is not None and count == before > 1 and self._writes_no_prompt(sampled, seen):
            self._rates.learn(count, sum(map(len, sampled)), (began - last) * 1e3)
        if count == 1:
            return True
        drafts = self._rates.drafts(count)
        self._rates.advance(count, drafts)
        return drafts

    def _writes_no_prompt(self, sampled: Sequence[Sequence[int]], seen: TargetPass) -> bool:
        most = self._config.speculative_config.num_speculative_tokens + 1
        return all(sampled) and all(end - start <= most for start, end in pairwise(seen.starts))

    def _learn_price(self, price: RowPrice, sampled: Sequence[Sequence[int]], seen: TargetPass, began: float) -> None:
        """Learn the time of a step, unless it wrote prompts."""
        assert self._proposer is not None
        if self._writes_no_prompt(sampled, seen):
            pass_ms, draft_ms = (began - seen.began) * 1e3, (perf_counter() - began) * 1e3
            price.learn(len(seen.tokens), sum(map(len, sampled)), pass_ms, draft_ms)
            self._proposer.least_gain = price.least_gain


Method = MethodProposer
"""The name for speculative configs."""
