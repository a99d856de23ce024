"""Several threads that use one model: they share the engine's batch, and each gets what it would get alone."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import outpace
from tests.unit.models.tiny import save_tiny_model

METHODS = ("plain", "recycle:budget=8", "outpace:draft=none", "linear:budget=4", "lookup")
PROMPTS = [f"{word}, {word}" for word in ("Hello", "abc", "One two", "é", "Yes", "no no", "x", "last one")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> outpace.Model:
    folder = save_tiny_model(tmp_path_factory.mktemp("threads"), max_position_embeddings=512)
    return outpace.load(str(folder), dtype="float32", device="cpu", max_num_seqs=3)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_threads_get_what_they_would_get_alone(model: outpace.Model, temperature: float) -> None:
    """Guards against threads that step the same engine at once: internal errors, other tokens, or a wait for ever."""
    options: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "seed": 7}
    plain = [model.generate(prompt, method="plain", **options).token_ids for prompt in PROMPTS]

    def ask(number: int) -> bool:
        place, method = number % len(PROMPTS), METHODS[number % len(METHODS)]
        if number % 3:
            return bool(model.generate(PROMPTS[place], method=method, **options).token_ids == plain[place])
        stream = model.stream(PROMPTS[place], method=method, **options)
        return bool(tuple(token for event in stream for token in event.tokens) == plain[place])

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(ask, range(30)))
    assert model.engine.free_slots == model.target.max_slots


@pytest.mark.timeout(120)
def test_a_request_that_fails_fails_alone(model: outpace.Model) -> None:
    """Guards against an error of one thread's request in another thread."""
    wanted = model.generate(PROMPTS[0], method="plain", max_new_tokens=16).token_ids

    def ask(number: int) -> bool:
        if number % 4 == 0:
            with pytest.raises(outpace.InvalidRequest, match="the prompt has"):
                model.generate("a" * 600, max_new_tokens=4)
            return True
        return bool(model.generate(PROMPTS[0], method="recycle", max_new_tokens=16).token_ids == wanted)

    with ThreadPoolExecutor(5) as pool:
        assert all(pool.map(ask, range(20)))
