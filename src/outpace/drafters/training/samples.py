"""Sequences to train on: prompts and the target's answers to them, with a mask that tells the two apart."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.data.answers import Conversation
from outpace.data.workload import WorkItem
from outpace.lib.errors import InvalidRequest
from outpace.models.text import TextCodec


@dataclass(frozen=True, eq=False)
class TrainingSample:
    """One turn as the target saw it.

    Attributes:
        name: prompt id and turn.
        ids: [T] int64, prompt and answer.
        mask: [T] bool, true where the token is the target's own: what a loss may be taken on.
    """

    name: str
    ids: Tensor
    mask: Tensor


def by_id(items: Iterable[WorkItem]) -> dict[str, WorkItem]:
    """Prompts by their ids, in their order.

    Raises:
        InvalidRequest: two prompts of one id.
    """
    known: dict[str, WorkItem] = {}
    for item in items:
        if item.id in known:
            raise InvalidRequest(f"prompts: id {item.id!r} occurs twice; answers are stored by it")
        known[item.id] = item
    return known


def training_samples(
    items: Iterable[WorkItem], conversations: Iterable[Conversation], codec: TextCodec, max_length: int
) -> Iterator[TrainingSample]:
    """Join answers with their prompts again, each turn a sample of its own.

    Args:
        items: prompts; those without an answer are left out.
        conversations: answers, as stored.
        codec: the target's tokenizer.
        max_length: longer samples are cut at the end; those of which only the prompt would remain are left out.

    Raises:
        InvalidRequest: an answer to a prompt that is not there; two prompts of one id.
    """
    known = by_id(items)
    for conversation in conversations:
        item = known.get(conversation.id)
        if item is None:
            raise InvalidRequest(
                f"prompts: no prompt {conversation.id!r}, which was answered; give the file that was answered"
            )
        texts: list[str] = []
        for turn, answer in enumerate(conversation.answers):
            prompt = encode_prompt(codec, item, turn, texts)
            texts.append(codec.decode(answer))
            ids = torch.tensor([*prompt, *answer])[:max_length]
            if len(ids) > len(prompt):
                mask = torch.arange(len(ids)) >= len(prompt)
                yield TrainingSample(f"{item.id}/{turn}", ids, mask)


def encode_prompt(codec: TextCodec, item: WorkItem, turn: int, texts: list[str]) -> list[int]:
    """Ids of a turn's prompt, given the answers to the turns before."""
    encode: Callable[..., list[int]] = codec.encode if item.raw else codec.encode_chat
    return encode(item.prompt(turn, texts))
