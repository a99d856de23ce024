"""Features captured before training: for runs that are repeated, or a GPU too small for target and drafter at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from outpace.lib.errors import InvalidRequest
from outpace.models.frozen import FrozenTarget
from outpace.train.data import SampleSet
from outpace.train.features_store import FeatureStore


def about_features(
    target_name: str, target: FrozenTarget, taps: tuple[int, ...], dtype: str, max_length: int, answers: str
) -> dict[str, Any]:
    """What features depend on, as `FeatureStore` keeps it.

    Args:
        target_name, target: whose hidden states.
        taps: which of them.
        dtype: that they are stored in.
        max_length: at which sequences were cut.
        answers: hash of the answers.
    """
    return {
        "target": target_name,
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "vocab_size": target.vocab_size,
        "taps": list(taps),
        "width": len(taps) * target.hidden_size,
        "dtype": dtype,
        "max_length": max_length,
        "answers": answers,
    }


def capture(
    samples: SampleSet, target: FrozenTarget, store: FeatureStore, taps: tuple[int, ...], done: Callable[[], None]
) -> int:
    """Store the target's hidden states of the sequences that the store lacks.

    Args:
        samples: sequences.
        target: whose answers they hold.
        store: what it has is not made again.
        taps: as the store says of itself.
        done: called after each sequence.

    Returns:
        How many sequences were captured.

    Raises:
        InvalidRequest: the disk is too small; nothing was written.
    """
    missing = [index for index in range(len(samples)) if not store.has(samples.names[index])]
    store.check_room(int(samples.lengths[missing].sum()))

    def pairs() -> Iterator[tuple[str, Tensor]]:
        for index in missing:
            sample = samples[index]
            rows = target.features(sample.ids[None].to(target.device), [len(sample.ids)], taps)[0]  # [T, taps * H]
            yield sample.name, rows
            done()

    store.write(pairs())
    return len(missing)


def stored_features(
    folder: str, taps: Sequence[int], target: FrozenTarget, samples: SampleSet, max_length: int
) -> Callable[[str], Tensor]:
    """What reads features captured before, by the names of sequences.

    Args:
        folder: of features.
        taps: the hidden states that are wanted.
        target: whose.
        samples: sequences that need them.
        max_length: at which these were cut.

    Raises:
        InvalidRequest: features of another target or other taps, of shorter sequences, or not of all.
    """
    if not taps:
        raise InvalidRequest(f"features={folder!r}: under these settings none are read; leave it out")
    store = FeatureStore.existing(folder)
    there = list(store.about["taps"])
    if absent := set(taps).difference(there):
        raise InvalidRequest(
            f"features={folder!r}: captured with taps={there}, and this run needs {sorted(absent)} too; capture them "
            "for this method and target"
        )
    wanted: Mapping[str, Any] = {"width": len(there) * target.hidden_size, "vocab_size": target.vocab_size}
    for field, value in wanted.items():
        if store.about.get(field) != value:
            raise InvalidRequest(
                f"features={folder!r}: captured with {field}={store.about.get(field)!r}, and this run needs {value!r}; "
                "capture them for this method and target"
            )
    if int(store.about.get("max_length", 0)) < max_length:
        raise InvalidRequest(
            f"features={folder!r}: captured with data.max_length={store.about.get('max_length')}, and this run has "
            f"{max_length}; capture longer sequences, or train on shorter ones"
        )
    missing = [name for name in samples.names if not store.has(name)]
    if missing:
        raise InvalidRequest(
            f"features={folder!r}: {len(missing)} of {len(samples)} sequences are not in it, such as {missing[0]!r}; "
            "run `outpace train capture` again, it goes on where it stopped"
        )
    return lambda name: store.read(name, target.dtype, taps)
