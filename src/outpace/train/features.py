"""The target's hidden states of training sequences: stored on disk for repeated runs and small GPUs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.data.answers import PartFolder, contradiction, opened_part
from outpace.lib.checks import check_same, is_int
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.stages import Progress
from outpace.models.frozen import FrozenTarget
from outpace.train.data import SampleSet
from outpace.train.records import check_disk

CONTENTS = "features"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}
PART_BYTES = 2 << 30
LIKELIEST = 16  # ids kept per distribution: more than a row of transitions has, as their sums may rank differently
ROWS = 256  # positions whose logits are computed at a time


def check_stored(dtype: str) -> None:
    """Refuse a format that features cannot be stored in (InvalidRequest)."""
    if dtype not in DTYPES:
        raise InvalidRequest(f"stored={dtype!r}: features are stored in {', '.join(DTYPES)}")


class FeatureStore:
    """A folder of features by the names of their sequences.

    8-bit values have a float32 scale per row and tap, as taps differ in magnitude.

    Args:
        folder: new, or of an earlier run with the same settings; created by the first part that is written.
        about: settings that the features depend on, in JSON, among them "dtype" (a key of DTYPES), "taps" and "width",
            the number of columns of all taps together.
        part_bytes: size of a part, unless a single sequence is larger.
    """

    def __init__(self, folder: str | Path, about: Mapping[str, Any], part_bytes: int = PART_BYTES) -> None:
        self._files, self.about, self._part_bytes = PartFolder(folder, CONTENTS), dict(about), part_bytes
        check_stored(about["dtype"])
        self.folder = self._files.path
        self._dtype, self._taps, self._width = about["dtype"], len(about["taps"]), int(about["width"])
        self._files.check(self.about)
        self._places: dict[str, tuple[Path, int]] = {}
        for part in self._files.parts():
            self._index(part)

    @classmethod
    def existing(cls, folder: str | Path) -> "FeatureStore":
        """The store in a folder, with its own settings."""
        about = PartFolder(folder, CONTENTS).about()
        taps, sizes = about.get("taps"), (about.get("width"), about.get("max_length", 0))
        if about.get("dtype") not in [*DTYPES] or not isinstance(taps, list) or not all(map(is_int, [*taps, *sizes])):
            raise ModelError(f"{CONTENTS}={str(folder)!r}: its dtype, taps and width are not stated; capture again")
        return cls(folder, {name: value for name, value in about.items() if name != "format"})

    def bytes_of(self, tokens: int) -> int:
        """Bytes of this many rows, with their scales."""
        size = DTYPES[self._dtype].itemsize
        return tokens * (self._width * size + (4 * self._taps if size == 1 else 0))

    def __len__(self) -> int:
        return len(self._places)

    def has(self, name: str) -> bool:
        return name in self._places

    def check_room(self, tokens: int) -> None:
        """Refuse a disk that is too small for this many more rows (InvalidRequest)."""
        check_disk(self.folder, self.bytes_of(tokens), f"{CONTENTS} of {tokens} tokens")

    def write(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Add sequences, in parts of `part_bytes`; the last part is written at the end, or when the iterable fails.
        `pairs`: names and features [T, width]."""
        waiting: dict[str, dict[str, Tensor]] = {}
        size = 0
        try:
            for name, rows in pairs:
                assert rows.shape[1:] == (self._width,), "rows have the recorded width"
                packed = self._packed(name, rows)
                own = sum(tensor.nbytes for tensor in packed.values())
                if waiting and size + own > self._part_bytes:
                    full, waiting, size = waiting, {}, 0
                    self._add(full)
                waiting[name] = packed
                size += own
        finally:
            if waiting:
                self._add(waiting)

    def read(self, name: str, dtype: torch.dtype = torch.float32, taps: Sequence[int] | None = None) -> Tensor:
        """Features of a sequence. `taps`: stored taps to read, in this order; None for all. Returns [T, width], or [T,
        taps * H]."""
        if name not in self._places:
            raise ModelError(f"{CONTENTS}={str(self.folder)!r}: none of {name!r}; capture them first")
        part, at = self._places[name]
        with opened_part(part) as (file, _):
            rows: Tensor = file.get_tensor(f"{at}.rows")
            scales: Tensor | None = file.get_tensor(f"{at}.scales") if rows.element_size() == 1 else None  # [T, taps]
        apart = rows.unflatten(1, (self._taps, -1))  # [T, taps, H]
        if scales is not None:
            apart = apart.float() * scales[:, :, None]
        if taps is not None and list(taps) != self.about["taps"]:
            apart = apart[:, [self.about["taps"].index(tap) for tap in taps]]
        joined: Tensor = apart.flatten(1).to(dtype)
        return joined

    def _packed(self, name: str, rows: Tensor) -> dict[str, Tensor]:
        """The tensors to store for rows [T, width], by name."""
        kind = DTYPES[self._dtype]
        if kind.itemsize > 1:
            packed = {"rows": rows.detach().to("cpu", kind, copy=True).contiguous()}
        else:
            apart = rows.detach().cpu().float().unflatten(1, (self._taps, -1))  # [T, taps, H]
            scales = apart.abs().amax(dim=2) / torch.finfo(kind).max  # [T, taps]
            scales = scales.clamp(min=torch.finfo(torch.float32).tiny)  # for rows of zeros
            packed = {"rows": (apart / scales[:, :, None]).flatten(1).to(kind), "scales": scales}
        if not all(bool(tensor.float().isfinite().all()) for tensor in packed.values()):
            raise ModelError(f"{name!r}: its features are NaN or beyond {self._dtype}; choose stored=bfloat16")
        return packed

    def _add(self, packed: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._files.claim(self.about)
        sequences = enumerate(packed.values())
        tensors = {f"{at}.{kind}": tensor for at, own in sequences for kind, tensor in own.items()}
        self._index(self._files.write(tensors, list(packed)))

    def _index(self, part: Path) -> None:
        """Remember where the sequences of a part are, after checking that its tensors are complete."""
        kinds = ("rows", "scales") if DTYPES[self._dtype].itemsize == 1 else ("rows",)
        with opened_part(part) as (file, names):
            if {*file.keys()} != {f"{at}.{kind}" for at in range(len(names)) for kind in kinds}:
                raise contradiction(part)
            for at in range(len(names)):
                if file.get_slice(f"{at}.rows").get_shape()[1:] != [self._width]:
                    raise contradiction(part)
        self._places |= {name: (part, at) for at, name in enumerate(names)}


def about_features(
    target_name: str,
    target: FrozenTarget,
    taps: Sequence[int],
    dtype: str,
    answers: Mapping[str, Any],
    max_length: int,
) -> dict[str, Any]:
    """The settings that features depend on, for `FeatureStore`. `answers`: the settings of the answers, so that more of
    the same can be added; `max_length`: tokens of a sequence."""
    return {
        "target": target_name,
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "vocab_size": target.vocab_size,
        "taps": list(taps),
        "width": len(taps) * target.config.hidden_size,
        "dtype": dtype,
        "max_length": max_length,
        "answers": _settings_of(answers),
    }


def _settings_of(answers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answers.items() if name != "format"}


def capture(
    samples: SampleSet, target: FrozenTarget, store: FeatureStore, taps: tuple[int, ...], progress: Progress
) -> int:
    """Store the features of the sequences that the store lacks. Returns how many sequences were captured."""
    missing = [index for index in range(len(samples)) if not store.has(samples[index].key)]
    store.check_room(int(samples.lengths[missing].sum()))

    def pairs() -> Iterator[tuple[str, Tensor]]:
        with progress("sequences", len(missing)) as advance:
            for index in missing:
                sample = samples[index]
                yield sample.key, target.features(sample.ids[None].to(target.device), [len(sample.ids)], taps)[0]
                advance()

    store.write(pairs())
    return len(missing)


def stored_features(
    folder: str,
    taps: Sequence[int],
    target: FrozenTarget,
    samples: SampleSet,
    max_length: int,
    answers: Mapping[str, Any],
) -> Callable[[str], Tensor]:
    """A function that reads captured features by the keys of sequences. There are more rows than a sequence has tokens
    where it was captured with a larger data.max_length: callers cut them. `answers`: the settings of the answers."""
    store = FeatureStore.existing(folder)
    there = list(store.about["taps"])
    if absent := set(taps).difference(there):
        raise InvalidRequest(
            f"features={folder!r}: captured with taps={there}, and this run needs {sorted(absent)} too; capture them "
            "for this method and target"
        )
    wanted = {"width": len(there) * target.hidden_size, "vocab_size": target.vocab_size}
    found, said = {name: store.about.get(name) for name in wanted}, f"features={folder!r}: captured"
    check_same(found, wanted, said, "capture them for this method and target")
    made, own = store.about.get("answers") or {}, _settings_of(answers)
    check_same(made, own, f"{said} for answers", "capture them for these answers")
    if int(store.about.get("max_length", 0)) < max_length:
        raise InvalidRequest(
            f"features={folder!r}: captured with data.max_length={store.about.get('max_length')}, and this run has "
            f"{max_length}; capture longer sequences, or train on shorter ones"
        )
    missing = [name for at, name in enumerate(samples.names) if not store.has(samples[at].key)]
    if missing:
        raise InvalidRequest(
            f"features={folder!r}: {len(missing)} of {len(samples)} sequences are not in it, such as {missing[0]!r}; "
            "run `outpace train capture` again to complete it"
        )
    return partial(store.read, dtype=target.dtype, taps=taps)


@torch.inference_mode()
def expected(
    samples: SampleSet, target: FrozenTarget, stored: Callable[[str], Tensor] | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The target's distributions over sequences, prompts included, for tables of transitions. `stored`: reads captured
    inputs of the target's head [T, H] by a sequence's key; None to run the target. Yields for each sequence its ids
    without the last [T - 1], the likeliest ids after each [T - 1, 16], and their probabilities [T - 1, 16]."""
    for index in range(len(samples)):
        sample = samples[index]
        if stored is None:
            hidden = target.features(sample.ids[None].to(target.device), [len(sample.ids)], (target.layers,))[0]
        else:
            hidden = stored(sample.key)[: len(sample.ids)].to(target.device)
        found = [_likeliest(target, rows) for rows in hidden[:-1].split(ROWS)]
        ids, probs = (torch.cat(parts) for parts in zip(*found, strict=True))
        yield sample.ids[:-1], ids, probs


def _likeliest(target: FrozenTarget, hidden: Tensor) -> tuple[Tensor, Tensor]:
    logits = target.logits(hidden).float()  # [R, V]
    top = logits.topk(min(LIKELIEST, logits.shape[1]), dim=-1)
    return top.indices, (top.values - logits.logsumexp(dim=-1, keepdim=True)).exp()
