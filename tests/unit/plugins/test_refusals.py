"""What `generate` may be asked for and cannot be given exactly: refused by name, never ignored."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
)
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

import outpace
from outpace.lib.errors import InvalidRequest, UnsupportedModel
from outpace.models.borrow import borrow_target
from outpace.plugins.transformers import check_config
from tests.unit.models.tiny import stock_model, tiny_config
from tests.unit.plugins.test_transformers import Recorder, generate, padded


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return stock_model(tiny_config("llama"))


class Biased(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores + 1


class Impatient(StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return True


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 2}, "generation mode 'beam_search'"),
    ({"prompt_lookup_num_tokens": 3}, "generation mode 'assisted_generation'"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "generation mode 'contrastive_search'"),
    ({"logits_processor": [Biased()]}, "Biased: this logits processor is not supported"),
    ({"stopping_criteria": [Impatient()]}, "Impatient: this stopping criterion is not supported"),
    ({"max_time": 9.0}, "MaxTimeCriteria: this stopping criterion"),
    ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor: this logits processor"),
    ({"suppress_tokens": [3]}, "SuppressTokensLogitsProcessor: this logits processor"),
    ({"do_sample": True, "typical_p": 0.5}, "TypicalLogitsWarper: this logits processor"),
    ({"prefix_allowed_tokens_fn": lambda row, ids: [1]}, "PrefixConstrainedLogitsProcessor: this logits processor"),
    ({"do_sample": True, "logits_processor": [TopPLogitsWarper(0.5)], "temperature": 0.5}, "that order is not supp"),
    ({"do_sample": True, "logits_processor": [MinPLogitsWarper(0.1), MinPLogitsWarper(0.2)]}, "comes twice"),
    ({"do_sample": True, "logits_processor": [TopPLogitsWarper(0.5, filter_value=-1.0)]}, "filter_value cannot be"),
    ({"return_dict_in_generate": True, "output_scores": True}, "output_scores=True"),
    ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states=True"),
    ({"past_key_values": DynamicCache()}, "(cache|past_key_values): your own cache"),
    ({"position_ids": torch.arange(17).repeat(3, 1) + 1}, "position_ids"),
    ({"output_router_logits": True}, "."),
    ({"synced_gpus": True}, "synced_gpus=True"),
    ({"eos_token_id": 3, "logits_processor": [MinNewTokensLengthLogitsProcessor(17, 5, 7)]}, "its eos_token_id=.7."),
    ({"repetition_penalty": 1.4}, "repetition_penalty=1.4: stock `generate` penalises the padding"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("options", "complaint"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused_by_name(model: PreTrainedModel, options: dict[str, Any], complaint: str) -> None:
    """Guards against an option that is dropped in silence: an answer that looks right and is another."""
    with pytest.raises(ValueError, match=complaint) as error:  # some are transformers' own refusals
        generate(model, padded(), "recycle", **options)
    assert complaint == "." or isinstance(error.value, InvalidRequest)


def test_options_that_change_the_answer_change_ours_alike(model: PreTrainedModel) -> None:
    """Guards against an option that nobody applies, or that counts the prompt's tokens as the answer's."""
    inputs = padded((8,))
    before, said = generate(model, inputs)[0, 9:11].tolist()
    ends: dict[str, Any] = {"eos_token_id": said}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"repetition_penalty": 1.4}, {}),
        ({"min_new_tokens": 20, **ends}, ends),
        ({"min_length": 20, **ends}, ends),
        ({"bad_words_ids": [[said]]}, {}),
        ({"bad_words_ids": [[before, said]]}, {}),
    ]
    for options, without in cases:
        ours = generate(model, inputs, "recycle", **options)
        assert torch.equal(ours, generate(model, inputs, **options)), options
        assert not torch.equal(ours, generate(model, inputs, **without)), options


def test_a_minimum_counts_from_the_length_that_its_processor_names(model: PreTrainedModel) -> None:
    """Guards against a minimum of new tokens where the caller's processor counts the prompt's too."""
    inputs = padded((8,))
    end = int(generate(model, inputs)[0, 10])
    options: dict[str, Any] = {"eos_token_id": end, "logits_processor": [MinNewTokensLengthLogitsProcessor(0, 8, end)]}
    ours = generate(model, inputs, "recycle", **options)
    assert torch.equal(ours, generate(model, inputs, **options))
    assert ours.shape[1] <= 11


def test_an_eos_among_bad_words_is_not_banned(model: PreTrainedModel) -> None:
    """Guards against answers that never end: stock `generate` takes EOS out of bad words."""
    inputs = padded((8,))
    end = int(generate(model, inputs)[0, 12])
    options: dict[str, Any] = {"bad_words_ids": [[end]], "eos_token_id": end}
    ours = generate(model, inputs, "recycle", **options)
    assert torch.equal(ours, generate(model, inputs, **options))
    assert ours.shape[1] < 8 + 24


def test_attention_that_differs_from_the_trained_one_is_refused() -> None:
    """Guards against two answers that differ because stock scaled-dot-product attention leaves out Gemma 2's cap."""
    capped = stock_model(tiny_config("gemma2"), "eager")
    capped.config._attn_implementation = "sdpa"  # newer versions of transformers refuse to build it so
    with pytest.raises(InvalidRequest, match=r"'sdpa' leaves out its cap.*attn_implementation='eager'"):
        generate(capped, padded(), "plain")


def test_what_transformers_hides_is_refused(model: PreTrainedModel) -> None:
    """Guards against full precision where a coarser cache was asked for, and an assistant loaded for nothing."""
    with pytest.raises(InvalidRequest, match="cache_implementation='quantized'"):
        check_config(model, GenerationConfig(cache_implementation="quantized"), None)
    with pytest.raises(InvalidRequest, match="assisted_generation"):
        generate(model, padded((6,)), "recycle", assistant_model=model)


def test_harmless_options_pass(model: PreTrainedModel) -> None:
    """Guards against refusing what changes no token, or what the model's own configuration always carries."""
    inputs, stock = padded(), generate(model, padded())
    for options in ({"use_cache": False}, {"output_scores": True}, {"top_p": 0.5}, {"renormalize_logits": True}):
        assert torch.equal(generate(model, inputs, "recycle", **options), stock)
    warmed = {"logits_processor": [TemperatureLogitsWarper(2.0)]}
    assert torch.equal(generate(model, inputs, "recycle", **warmed), stock), "greedy decoding knows no temperature"


def test_padding_anywhere_but_on_the_left_is_refused(model: PreTrainedModel) -> None:
    """Guards against pad tokens taken for text; stock `generate` warns and answers nonsense."""
    for change in ([1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]):
        inputs = padded((4, 4))
        inputs["attention_mask"][1] = torch.tensor(change)
        with pytest.raises(InvalidRequest, match="padding must be on the left"):
            generate(model, inputs, "recycle")
    embedded = {"inputs_embeds": model.get_input_embeddings()(padded()["input_ids"])}
    with pytest.raises(InvalidRequest, match="inputs_embeds"):
        generate(model, embedded, "recycle")


def test_bad_settings_are_refused_before_any_model() -> None:
    """Guards against a typing error that shows only after minutes of loading, and a trained drafter that is asked for
    and cannot be given."""
    methods = ("magic", "recycle:depth=2", "domino", "outpace:draft=eagle3", "samd:draft=dflash")
    bad: list[dict[str, Any]] = [{"budget": 600}, {"seed": -1}, *({"method": name} for name in methods)]
    for options in bad:
        with pytest.raises(InvalidRequest, match=next(iter(options))):
            outpace.custom_generate(**options)


def test_models_that_cannot_be_borrowed_are_refused() -> None:
    """Guards against wrong answers from models whose computation our copy would miss."""
    with pytest.raises(UnsupportedModel, match="model_type='bloom'"):
        borrow_target(BloomForCausalLM(BloomConfig(n_layer=1, hidden_size=8, n_head=2, vocab_size=20)), 8, 1)
    model = stock_model(tiny_config("llama", attention_dropout=0.1)).train()
    with pytest.raises(InvalidRequest, match="training mode and has dropout"):
        borrow_target(model, 8, 1)
    borrow_target(model.eval(), 8, 1)
    hooked: list[tuple[Any, str]] = [(model, "model"), (model.lm_head, "output layer")]
    for part, place in hooked:
        hook = part.register_forward_hook(lambda module, args, output: output)
        with pytest.raises(UnsupportedModel, match=f"a hook on its {place} would not run"):
            borrow_target(model, 8, 1)
        hook.remove()
    model.lm_head = nn.Sequential(model.lm_head)  # as adapters wrap it
    with pytest.raises(UnsupportedModel, match="output layer is a Sequential"):
        borrow_target(model, 8, 1)
    model = stock_model(tiny_config("llama"))
    layer = model.get_decoder().layers[1]
    layer.forward = layer.forward  # as offloading hooks do
    with pytest.raises(UnsupportedModel, match=r"forward of its layers.1 has been replaced"):
        borrow_target(model, 8, 1)
    model = stock_model(tiny_config("llama"))
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedModel, match="must be on one device"):
        borrow_target(model, 8, 1)


def test_a_refused_call_does_not_end_the_stream(model: PreTrainedModel) -> None:
    """Guards against an error reported as the end of an answer."""
    recorder = Recorder()
    with pytest.raises(InvalidRequest):
        generate(model, padded((5,)), "recycle", streamer=recorder, no_repeat_ngram_size=2)
    assert recorder.ended == 0


def test_learned_prompts_are_refused(model: Any) -> None:
    """Guards against the answer of the model without its learned prompt: peft gives that to `generate` alone, through
    `prepare_inputs_for_generation`, and puts the model's own method back afterwards."""

    class Tuned:
        def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
            return {}

    own = model.prepare_inputs_for_generation
    try:
        model.prepare_inputs_for_generation = Tuned().prepare_inputs_for_generation
        with pytest.raises(UnsupportedModel, match="as peft does for prompt and prefix tuning"):
            generate(model, padded(), "recycle")
        model.prepare_inputs_for_generation = own
        assert torch.equal(generate(model, padded(), "recycle"), generate(model, padded()))
    finally:
        del model.prepare_inputs_for_generation
