"""The sequences of a training run: prompts joined with answers, split, and distributed over steps and processes."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from outpace.api import encoded
from outpace.data.answers import Conversation
from outpace.data.workload import WorkItem
from outpace.drafters.training.batch import Batch, Facts, TrainingSample, collate, sample_seed
from outpace.lib.errors import InvalidRequest
from outpace.models.tokenizer import TextCodec


def by_id(items: Iterable[WorkItem]) -> dict[str, WorkItem]:
    """Prompts by their ids, in order."""
    known: dict[str, WorkItem] = {}
    for item in items:
        if item.id in known:
            raise InvalidRequest(f"prompts: id {item.id!r} occurs twice; answers are stored by it")
        known[item.id] = item
    return known


def check_asked(item: WorkItem, prompt: int) -> None:
    """Refuse a prompt whose text differs from the answered one with its id. `prompt`: digest from `Conversation`."""
    if prompt not in (0, item.digest):
        raise InvalidRequest(
            f"prompts: {item.id!r} was another prompt when it was answered; give the file that was answered, or choose "
            "a new folder for answers"
        )


def training_samples(
    items: Iterable[WorkItem], conversations: Iterable[Conversation], codec: TextCodec, max_length: int
) -> Iterator[TrainingSample]:
    """Join answers with their prompts, one sample per turn. `max_length`: longer samples are cut at the end, and left
    out if only the prompt would remain."""
    known = by_id(items)
    for conversation in conversations:
        item = known.get(conversation.id)
        if item is None:
            raise InvalidRequest(
                f"prompts: no prompt {conversation.id!r}, which was answered; give the file that was answered"
            )
        check_asked(item, conversation.prompt)
        texts: list[str] = []
        for turn, answer in enumerate(conversation.answers):
            prompt = encoded(item.prompt(turn, texts), codec)
            texts.append(codec.decode(answer))
            ids = torch.tensor([*prompt, *answer])[:max_length]
            if len(ids) > len(prompt):
                mask = torch.arange(len(ids)) >= len(prompt)
                # The hash excludes the prompt's ids: chat templates may contain the date.
                source = _hash(f"{item.digest}/{conversation.answers[: turn + 1]}").hex()
                yield TrainingSample(f"{item.id}/{turn}", ids, mask, source, item.digest)


class SampleSet(Dataset[TrainingSample]):
    """Sequences in one array of int32 ids, which processes that load data share."""

    def __init__(self, samples: Iterable[TrainingSample]) -> None:
        self.names: list[str] = []
        self._sources: list[str] = []
        self._firsts: list[str] = []  # of each sequence, the first of the prompts that ask the same
        known: dict[int, str] = {}
        starts, prompts, pieces = [0], [], []
        for sample in samples:
            self.names.append(sample.name)
            self._sources.append(sample.source)
            prompt = _prompt_of(sample.name)
            self._firsts.append(known.setdefault(sample.asked, prompt) if sample.asked else prompt)
            pieces.append(sample.ids.numpy().astype(np.int32))
            prompts.append(int((~sample.mask).sum()))
            starts.append(starts[-1] + len(sample.ids))
        self._ids = np.concatenate([np.empty(0, dtype=np.int32), *pieces])
        self._starts, self._prompts = np.array(starts), np.array(prompts, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> TrainingSample:
        ids = torch.from_numpy(self._ids[self._starts[index] : self._starts[index + 1]].astype(np.int64))
        mask = torch.arange(len(ids)) >= int(self._prompts[index])
        return TrainingSample(self.names[index], ids, mask, self._sources[index])

    @property
    def lengths(self) -> Tensor:
        """[S] tokens of each sequence."""
        return torch.from_numpy(np.diff(self._starts))

    @property
    def supervised(self) -> int:
        """Number of generated tokens, which are trained on."""
        return len(self._ids) - int(self._prompts.sum())

    @property
    def prompts(self) -> int:
        """Number of conversations, each of one sequence or more."""
        return len({_prompt_of(name) for name in self.names})

    @property
    def distinct(self) -> int:
        """Number of different prompts."""
        return len(set(self._firsts))

    def without(self, left_out: Sequence[int]) -> list[int]:
        """Indices of all sequences except these."""
        out = set(left_out)
        return [index for index in range(len(self)) if index not in out]

    def held_out(self, count: int) -> tuple[int, ...]:
        """Indices of sequences to measure on and not to train on: those of the `count` prompts with the lowest hashes
        of ids. All turns of a conversation are held out together, as later ones contain earlier ones; and all prompts
        that ask the same, as training on one would teach the answers to the others."""
        prompts = held_out_ids(self._firsts, count)
        chosen = [index for index, first in enumerate(self._firsts) if first in prompts]
        if len(chosen) >= len(self):
            raise InvalidRequest(
                f"data.held_out={count}: leaves nothing of {len(self)} sequences, of {self.distinct} different "
                "prompts, to train on; give more prompts or hold out fewer"
            )
        return tuple(chosen)

    def halves(self, held_out: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Held-out sequences for choosing a drafter, and for reporting, alternating by prompt: the best of many
        measurements is biased on the prompts that chose it."""
        prompts = sorted({self._firsts[index] for index in held_out}, key=_hash)
        choosing = set(prompts[::2])
        chosen = tuple(index for index in held_out if self._firsts[index] in choosing)
        return chosen, tuple(index for index in held_out if index not in set(chosen))

    def facts(self, indices: Sequence[int], vocab_size: int, special: Sequence[int]) -> Facts:
        """Token statistics of these sequences."""
        counts, seen = np.zeros(vocab_size, dtype=np.int64), np.zeros(vocab_size, dtype=bool)
        for index in indices:
            ids = self._ids[self._starts[index] : self._starts[index + 1]]
            if len(ids) and (ids.max() >= vocab_size or ids.min() < 0):
                raise InvalidRequest(
                    f"answers: {self.names[index]!r} has id {ids.max()}, and the target's vocabulary has {vocab_size}; "
                    "these are answers of another target"
                )
            seen[ids] = True
            own = ids[self._prompts[index] :]
            counts += np.bincount(own, minlength=vocab_size)
        return Facts(torch.from_numpy(counts), torch.from_numpy(~seen), tuple(special))


def held_out_ids(prompts: Iterable[str], count: int) -> set[str]:
    """The ids of prompts that are held out: those with the lowest hashes."""
    return set(sorted(set(prompts), key=_hash)[:count])


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _prompt_of(name: str) -> str:
    return name.rpartition("/")[0]


@dataclass(frozen=True)
class TrainingData(Dataset[tuple[TrainingSample, int, Tensor | None]]):
    """The data of a run. A data loader reads it by sequence and epoch: both, and features if they were captured.

    Attributes:
        held_out: indices of the sequences to measure on; the others are trained on.
        stored: reads captured features by a sequence's key (`stored_features`); None to compute them during training.
    """

    samples: SampleSet
    held_out: tuple[int, ...]
    stored: Callable[[str], Tensor] | None = None
    workers: int = 0

    def __getitem__(self, place: tuple[int, int]) -> tuple[TrainingSample, int, Tensor | None]:
        sample = self.samples[place[0]]
        features = None if self.stored is None else self.stored(sample.key)[: len(sample.ids)]
        return sample, place[1], features


@dataclass(frozen=True)
class BatchSampler:
    """Chooses the sequences of each process and step. They depend only on the step, so a run can resume anywhere. A
    step may take the last sequences of one epoch and the first of the next."""

    indices: tuple[int, ...]
    batch_size: int
    micro_batch_size: int
    seed: int
    rank: int = 0
    processes: int = 1

    def __post_init__(self) -> None:
        share = self.micro_batch_size * self.processes
        if self.batch_size % share:
            raise InvalidRequest(
                f"training.batch_size={self.batch_size}: must be a multiple of training.micro_batch_size="
                f"{self.micro_batch_size} times {self.processes} processes"
            )

    @property
    def passes(self) -> int:
        """Micro-batches per step and process."""
        return self.batch_size // (self.micro_batch_size * self.processes)

    def steps(self, epochs: float) -> int:
        """Steps of this many epochs; the last step is complete."""
        return max(1, -(-round(epochs * len(self.indices)) // self.batch_size))

    def micro_batches(self, samples: SampleSet, first_step: int, steps: int) -> Iterator[list[tuple[int, int]]]:
        """This process's passes of steps `first_step` to `steps` - 1: pairs of sequence and epoch. Sequences of similar
        length share a pass, as padding costs as much as tokens."""
        lengths, size = samples.lengths, len(self.indices)
        orders: dict[int, list[int]] = {}
        for step in range(first_step, steps):
            chosen = []
            for at in range(step * self.batch_size, (step + 1) * self.batch_size):
                epoch, place = divmod(at, size)
                if epoch not in orders:
                    generator = torch.Generator().manual_seed(sample_seed(self.seed, epoch, "order"))
                    orders = {
                        epoch - 1: orders.get(epoch - 1, []),
                        epoch: torch.randperm(size, generator=generator).tolist(),
                    }
                chosen.append((self.indices[orders[epoch][place]], epoch))
            chosen.sort(key=lambda pair: int(lengths[pair[0]]), reverse=True)
            for start in range(
                self.rank * self.micro_batch_size, self.batch_size, self.micro_batch_size * self.processes
            ):
                yield chosen[start : start + self.micro_batch_size]


def collate_examples(seed: int, examples: Sequence[tuple[TrainingSample, int, Tensor | None]]) -> Batch:
    """The padded batch of a pass. `seed`: the run's, for anchors."""
    seeds = [sample_seed(seed, epoch, sample.name) for sample, epoch, _ in examples]
    features = [rows for _, _, rows in examples if rows is not None]
    return collate([sample for sample, _, _ in examples], seeds, features)
