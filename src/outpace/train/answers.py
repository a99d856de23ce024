"""Regenerated answers on disk: token ids by prompt id, without the prompts, in parts that are written whole or not at
all, so that a run that was killed goes on where its last part ended."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outpace.core.errors import InvalidRequest, ModelError

FORMAT = "outpace.answers"
ABOUT = "about.json"


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
        self.folder, self.about = Path(folder).expanduser(), dict(about)
        if (self.folder / ABOUT).is_file():
            self._check_about()
        elif self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise InvalidRequest(f"out={str(folder)!r}: is no folder of answers; choose a new one")
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / ABOUT, json.dumps({"format": FORMAT, **self.about}, indent=1).encode())
        self.done = {conversation.id for conversation in read_answers(self.folder)}
        self._parts = len(_parts(self.folder))

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
        path = self.folder / f"part-{self._parts:05d}.safetensors"
        scratch = path.with_suffix(".tmp")
        try:
            save_file(tensors, scratch, {"format": FORMAT, "ids": json.dumps([one.id for one in conversations])})
            os.replace(scratch, path)
        except (OSError, SafetensorError) as error:
            scratch.unlink(missing_ok=True)
            raise ModelError(
                f"{path}: cannot be written ({error}); make room and run the same command again"
            ) from error
        self._parts += 1
        self.done |= {one.id for one in conversations}

    def _check_about(self) -> None:
        made = read_about(self.folder)
        for field in sorted({*made, *self.about} - {"format"}):
            if made.get(field) != self.about.get(field):
                raise InvalidRequest(
                    f"out={str(self.folder)!r}: its answers were made with {field}={made.get(field)!r}, and this run "
                    f"has {self.about.get(field)!r}; choose a new folder"
                )


def read_about(folder: str | Path) -> dict[str, Any]:
    """How the answers of a folder were made.

    Raises:
        ModelError: it is no folder of answers.
    """
    try:
        about = json.loads((Path(folder).expanduser() / ABOUT).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"answers={str(folder)!r}: no readable {ABOUT} in it ({error})") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ModelError(f"answers={str(folder)!r}: {ABOUT} is not that of regenerated answers")
    return about


def read_answers(folder: str | Path) -> Iterator[Conversation]:
    """All conversations of a folder, in the order in which they were written.

    Raises:
        ModelError: a part cannot be read, or contradicts itself.
    """
    for path in _parts(Path(folder).expanduser()):
        try:
            with safe_open(path, framework="pt") as opened:
                names = json.loads((opened.metadata() or {}).get("ids", "null"))
                ids, lengths, turns = (opened.get_tensor(name).long() for name in ("ids", "lengths", "turns"))
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read ({error}); delete it and run the same command again") from error
        if not isinstance(names, list) or len(names) != len(turns) or not _fit(ids, lengths, turns):
            raise ModelError(f"{path}: contradicts itself; delete it and run the same command again")
        answers = iter(ids.split(lengths.tolist()))
        for name, count in zip(names, turns.tolist(), strict=True):
            yield Conversation(name, tuple(tuple(next(answers).tolist()) for _ in range(count)))


def _fit(ids: Tensor, lengths: Tensor, turns: Tensor) -> bool:
    return int(lengths.sum()) == len(ids) and int(turns.sum()) == len(lengths)


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.safetensors"))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole, or as it was."""
    scratch = path.with_suffix(".tmp")
    scratch.write_bytes(content)
    os.replace(scratch, path)
