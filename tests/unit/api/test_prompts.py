"""What prompts, ids and names may be given as: whatever tokenizers, NumPy, torch and pathlib hand out simply works."""

from collections import UserDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

import outpace
from outpace.lib.errors import InvalidRequest
from tests.unit.models.tiny import byte_tokenizer

MESSAGE = {"role": "user", "content": "Hi"}
CHAT = [{"role": "system", "content": "Be brief."}, MESSAGE]
IDS = [72, 105, 33]


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> outpace.Model:
    return outpace.load(checkpoint, dtype="float32", device="cpu", profile=False)


def rendered(model: outpace.Model, messages: list[dict[str, str]], **options: Any) -> Any:
    return model.codec.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **options)


def test_what_a_tokenizer_returns_is_its_ids(model: outpace.Model) -> None:
    """Guards against the mapping of transformers 5, whose keys "input_ids" and so on were answered as texts."""
    wanted = model.generate(CHAT, max_new_tokens=3)
    encoding = rendered(model, CHAT)
    for given in (encoding, dict(encoding), encoding["input_ids"], MappingProxyType(dict(encoding))):
        answer = model.generate(given, max_new_tokens=3)
        assert (answer.prompt_ids, answer.token_ids) == (wanted.prompt_ids, wanted.token_ids)
        stream = model.stream(given, max_new_tokens=3)
        assert tuple(token for event in stream for token in event.tokens) == wanted.token_ids
    tensors = rendered(model, CHAT, return_tensors="pt")
    for rows in (tensors, tensors["input_ids"], tensors["input_ids"].numpy()):
        (row,) = model.generate(rows, max_new_tokens=3)
        assert row.token_ids == wanted.token_ids
        assert tuple(model.encode(rows)) == wanted.prompt_ids


def test_padding_of_a_batch_is_left_out(model: outpace.Model) -> None:
    """Guards against padding that is answered as if it had been said."""
    tokenizer: Any = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token  # the model's own tokenizer has none
    texts = ["hello", "hello hello"]
    wanted = [model.encode(text) for text in texts]
    for side in ("left", "right"):
        encoding = tokenizer(texts, padding=True, padding_side=side)
        masks = [[0] * 6 + [1] * 5, [1] * 11] if side == "left" else [[1] * 5 + [0] * 6, [1] * 11]
        padded = [[0] * 6 + wanted[0], wanted[1]] if side == "left" else [wanted[0] + [0] * 6, wanted[1]]
        for given in (encoding, {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(masks)}):
            answers: Any = model.generate(given, max_new_tokens=1)
            assert [list(answer.prompt_ids) for answer in answers] == wanted
    with pytest.raises(InvalidRequest, match="attention_mask: must have a number for each"):
        model.generate({"input_ids": [[1, 2]], "attention_mask": [[1]]})


def test_one_message_is_a_conversation_of_one(model: outpace.Model) -> None:
    """Guards against a message whose keys "role" and "content" are answered as two texts."""
    wanted = model.encode([MESSAGE])
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    for given in (MESSAGE, (MESSAGE,), UserDict(MESSAGE), MappingProxyType(MESSAGE), parts):
        assert model.encode(given) == wanted  # type: ignore[arg-type]
    batch = model.generate([[MESSAGE], [MESSAGE]], max_new_tokens=1)
    assert [list(answer.prompt_ids) for answer in batch] == [wanted] * 2


def test_ids_of_numpy_and_torch_are_ids(model: outpace.Model) -> None:
    """Guards against a TypeError for ids that are no Python integers, in prompts and in options."""
    array, tensor = np.array(IDS), torch.tensor(IDS)
    small, short = array.astype(np.uint8), tensor.int()
    for given in (array, tensor, list(array), small, short, array[None], tensor[None], tuple(IDS)):
        assert model.encode(given) == IDS  # type: ignore[arg-type]
    both: Any = [array, tensor]
    assert [list(one.prompt_ids) for one in model.generate(both, max_new_tokens=1)] == [IDS, IDS]
    plain = model.generate(IDS, max_new_tokens=12, ignore_eos=True)
    last = plain.token_ids[4]
    ends = (last, np.int64(last), [np.int64(last)], np.array([last]), torch.tensor([last]), {last})
    answers = {model.generate(IDS, max_new_tokens=np.int32(12), eos_token_ids=end).token_ids for end in ends}
    assert answers == {plain.token_ids[: plain.token_ids.index(last) + 1]}
    words = ([[last]], np.array([[last]]))
    banned = [model.generate(IDS, max_new_tokens=6, bad_words_ids=ids).token_ids for ids in words]
    assert banned[0] == banned[1]


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        (None, "prompt=None, a NoneType"),
        (b"abc", "bytes are neither text nor ids; decode them"),
        ([b"abc"], "prompt of type bytes"),
        ({1, 2}, "a set: give text"),
        (Path("x"), "a PosixPath|a WindowsPath"),
        ({"text": "x"}, "must be a dict with 'role' and 'content'"),
        ({"role": "user", "content": None}, "content=None: must be text"),
        ({"role": "user", "content": 5}, "content=5: must be text"),
        ("\ud800", "character 0 is a lone surrogate"),
        (np.array([0.5]), "prompt of type float"),
        (np.ones((1, 1, 2), dtype=int), "a ndarray"),
        (torch.zeros(2, device="meta"), "a Tensor"),
        ([True], "prompt of type bool"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused_with_a_remedy(model: outpace.Model, prompt: Any, complaint: str) -> None:
    """Guards against bytes answered as ids, and against a TypeError from within."""
    for call in (model.generate, model.stream, model.encode):
        with pytest.raises(InvalidRequest, match=complaint):
            call(prompt)
    assert model.engine.is_idle


def test_paths_and_torchs_own_words(checkpoint: Path) -> None:
    """Guards against a path, a dtype of torch's or a device called wrong, and a word like "no", which would be true."""
    model = outpace.load(checkpoint, "linear", drafter=checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    assert (model.name, model.drafter) == (str(checkpoint), str(checkpoint))
    assert str(model.target.dtype) == "torch.float32"
    with pytest.raises(InvalidRequest, match=r"params=.*is a dict; give outpace\.SamplingParams"):
        model.generate("x", {"temperature": 1.0})  # type: ignore[call-overload]
    for flag in ("exact", "profile", "enable_prefix_caching", "progress"):
        with pytest.raises(InvalidRequest, match=f"{flag}='no': must be True or False"):
            outpace.load(checkpoint, **{flag: "no"})  # type: ignore[arg-type]
    for name in ("~nobody-of-this-name/x", "x" * 5000, "a\0b"):
        with pytest.raises(outpace.OutpaceError):
            outpace.load(name)
