"""Folders of the results of long runs, in parts that are written completely or not at all; and stores of answers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.lib.checks import check_same, path_of
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.tensor_file import opened, save_tensors

ABOUT, CONTENTS = "about.json", "answers"


class PartFolder:
    """A folder of parts, with a file of the settings that made them. An interrupted run resumes after the last part.
    `contents`: the word for the contents in errors: "answers", "features"."""

    def __init__(self, folder: str | Path, contents: str) -> None:
        self.path, self.contents = path_of(folder), contents
        self.format = f"outpace.{contents}"

    def parts(self) -> list[Path]:
        """Files of the parts, in the order of writing."""
        return sorted(self.path.glob("part-[0-9][0-9][0-9][0-9][0-9].safetensors"))

    def check(self, about: Mapping[str, Any]) -> None:
        """Refuse a folder with other contents, or contents made with other settings."""
        if (self.path / ABOUT).is_file():
            wanted = {"format": self.format, **json.loads(json.dumps(about))}
            check_same(self.about(), wanted, f"out={str(self.path)!r}: its {self.contents} were made")
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise InvalidRequest(f"out={str(self.path)!r}: is not a folder of {self.contents}; choose a new one")

    def claim(self, about: Mapping[str, Any]) -> None:
        """Record the settings in a new folder; errors as `check`."""
        self.check(about)
        if not (self.path / ABOUT).is_file():
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / ABOUT, json.dumps({"format": self.format, **about}, indent=1).encode())

    def about(self) -> dict[str, Any]:
        """The recorded settings, and the "format"."""
        where = f"{self.contents}={str(self.path)!r}"
        try:
            about = json.loads((self.path / ABOUT).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{where}: no readable {ABOUT} in it ({error})") from error
        if not isinstance(about, dict) or about.get("format") != self.format:
            raise ModelError(f"{where}: {ABOUT} is not that of a folder of {self.contents}")
        return about

    def write(self, tensors: Mapping[str, Tensor], names: list[str]) -> Path:
        """Add a part."""
        # The next number, not the count of parts: a damaged part may have been deleted.
        numbers = [int(part.stem.removeprefix("part-")) for part in self.parts()]
        path = self.path / f"part-{max(numbers, default=-1) + 1:05d}.safetensors"
        save_tensors(path, tensors, {"format": self.format, "ids": json.dumps(names)})
        return path


@contextmanager
def opened_part(part: Path) -> Iterator[tuple[Any, list[str]]]:
    """A part and the names in it; tensors are read when they are used."""
    with opened(part, "delete it and run the same command again") as file:
        names = json.loads((file.metadata() or {}).get("ids", "null"))
        if not isinstance(names, list):
            raise contradiction(part)
        yield file, names


def contradiction(part: Path) -> ModelError:
    """The error for a part whose tensors do not fit together."""
    return ModelError(f"{part}: contradicts itself; delete it and run the same command again")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file completely, or leave it unchanged."""
    scratch = path.with_suffix(".tmp")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    finally:
        with suppress(OSError):  # gone where all went well
            scratch.unlink()


@dataclass(frozen=True)
class Conversation:
    """The target's answers to one prompt. `answers`: token ids per turn, with the EOS where the target generated it.
    `prompt`: `WorkItem.digest` of the answered prompt; 0 if it is not recorded."""

    id: str
    answers: tuple[tuple[int, ...], ...]
    prompt: int = 0


class AnswerStore:
    """A folder of answers. `folder`: new, or of an earlier run with the same settings. `done`: ids of the answered
    prompts, with `Conversation.prompt`."""

    def __init__(self, folder: str | Path, about: Mapping[str, Any]) -> None:
        self._files, self.about = PartFolder(folder, CONTENTS), dict(about)
        self._files.claim(self.about)
        self.folder = self._files.path
        self.done = {conversation.id: conversation.prompt for conversation in read_answers(self.folder)}

    def write(self, conversations: Sequence[Conversation]) -> None:
        """Add a part."""
        if not conversations:
            return
        answers = [torch.tensor(ids, dtype=torch.int64) for one in conversations for ids in one.answers]
        ids, size = torch.cat([torch.empty(0, dtype=torch.int64), *answers]), int(self.about["vocab_size"])
        if len(ids) and int(ids.max()) >= size:
            raise ModelError(
                f"answers={str(self.folder)!r}: one has the id {int(ids.max())}, and the target's vocabulary has "
                f"{size} ids; let the server answer with the target"
            )
        tensors = {
            "ids": ids.to(torch.uint16 if size <= 1 << 16 else torch.int32),
            "lengths": torch.tensor([len(one) for one in answers], dtype=torch.int32),
            "turns": torch.tensor([len(one.answers) for one in conversations], dtype=torch.int32),
            "prompts": torch.tensor([one.prompt for one in conversations], dtype=torch.int64),
        }
        self._files.write(tensors, [one.id for one in conversations])
        self.done |= {one.id: one.prompt for one in conversations}


def read_about(folder: str | Path) -> dict[str, Any]:
    """The settings that the answers of a folder were made with."""
    return PartFolder(folder, CONTENTS).about()


def read_answers(folder: str | Path) -> Iterator[Conversation]:
    """All conversations of a folder, in the order in which they were written."""
    for path in PartFolder(folder, CONTENTS).parts():
        with opened_part(path) as (file, names):
            ids, lengths, turns = (file.get_tensor(name).long() for name in ("ids", "lengths", "turns"))
            is_recorded = "prompts" in file.keys()  # noqa: SIM118
            prompts = file.get_tensor("prompts") if is_recorded else torch.zeros_like(turns)
        counts = {len(names), len(turns), len(prompts)}
        if len(counts) > 1 or int(lengths.sum()) != len(ids) or int(turns.sum()) != len(lengths):
            raise contradiction(path)
        answers = iter(ids.split(lengths.tolist()))
        for name, count, prompt in zip(names, turns.tolist(), prompts.tolist(), strict=True):
            yield Conversation(name, tuple(tuple(next(answers).tolist()) for _ in range(count)), prompt)
