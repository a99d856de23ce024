"""Regenerated answers on disk: token ids by prompt id, without the prompts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.data.folder import PartFolder, contradiction, opened

CONTENTS = "answers"


@dataclass(frozen=True)
class Conversation:
    """What the target answered to one prompt.

    Attributes:
        id: of the prompt.
        answers: token ids per turn, the EOS included where the target ended by itself.
    """

    id: str
    answers: tuple[tuple[int, ...], ...]


class AnswerStore:
    """A folder of answers and of how they were made.

    Args:
        folder: new, or one that an earlier run with the same settings left.
        about: settings that the answers depend on; must be JSON.

    Raises:
        InvalidRequest: the folder holds answers made otherwise, or something else.
        ModelError: a part cannot be read.
    """

    def __init__(self, folder: str | Path, about: Mapping[str, Any]) -> None:
        self._files, self.about = PartFolder(folder, CONTENTS), dict(about)
        self._files.claim(self.about)
        self.folder = self._files.path
        self.done = {conversation.id for conversation in read_answers(self.folder)}

    def write(self, conversations: Sequence[Conversation]) -> None:
        """Add a part.

        Raises:
            ModelError: it cannot be written; what was written before stays.
        """
        if not conversations:
            return
        answers = [torch.tensor(ids, dtype=torch.int64) for one in conversations for ids in one.answers]
        ids = torch.cat([torch.empty(0, dtype=torch.int64), *answers])
        tensors = {
            "ids": ids.to(torch.uint16 if int(self.about["vocab_size"]) <= 1 << 16 else torch.int32),
            "lengths": torch.tensor([len(one) for one in answers], dtype=torch.int32),
            "turns": torch.tensor([len(one.answers) for one in conversations], dtype=torch.int32),
        }
        self._files.write(tensors, [one.id for one in conversations])
        self.done |= {one.id for one in conversations}


def read_about(folder: str | Path) -> dict[str, Any]:
    """How the answers of a folder were made.

    Raises:
        ModelError: it is no folder of answers.
    """
    return PartFolder(folder, CONTENTS).about()


def read_answers(folder: str | Path) -> Iterator[Conversation]:
    """All conversations of a folder, in the order in which they were written.

    Raises:
        ModelError: a part cannot be read, or contradicts itself.
    """
    for path in PartFolder(folder, CONTENTS).parts():
        with opened(path) as (file, names):
            ids, lengths, turns = (file.get_tensor(name).long() for name in ("ids", "lengths", "turns"))
        if len(names) != len(turns) or not _fit(ids, lengths, turns):
            raise contradiction(path)
        answers = iter(ids.split(lengths.tolist()))
        for name, count in zip(names, turns.tolist(), strict=True):
            yield Conversation(name, tuple(tuple(next(answers).tolist()) for _ in range(count)))


def _fit(ids: Tensor, lengths: Tensor, turns: Tensor) -> bool:
    return int(lengths.sum()) == len(ids) and int(turns.sum()) == len(lengths)
