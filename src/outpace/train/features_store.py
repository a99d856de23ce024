"""The target's hidden states of whole sequences on disk, so that several runs need the target no more than once."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.data.folder import PartFolder, contradiction, opened
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.train.states import check_disk

CONTENTS = "features"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}
PART_BYTES = 2 << 30


class FeatureStore:
    """A folder of features by the names of their sequences, and of how they were captured.

    Numbers of 8 bits have a float32 scale per row and tap, as taps differ in size by orders of magnitude.

    Args:
        folder: new, or one that an earlier run with the same settings left; made by the first part that is written.
        about: settings that the features depend on, in JSON, among them "dtype" (a key of DTYPES), "taps" and "width",
            the number of columns of all taps together.
        part_bytes: size of a part, unless a single sequence takes more.

    Raises:
        InvalidRequest: a dtype that is not known; the folder holds features made otherwise, or something else.
        ModelError: a part cannot be read.
    """

    def __init__(self, folder: str | Path, about: Mapping[str, Any], part_bytes: int = PART_BYTES) -> None:
        self._files, self.about, self._part_bytes = PartFolder(folder, CONTENTS), dict(about), part_bytes
        if about["dtype"] not in DTYPES:
            raise InvalidRequest(f"dtype={about['dtype']!r}: features are stored in {', '.join(DTYPES)}")
        self.folder = self._files.path
        self._dtype, self._taps, self._width = about["dtype"], len(about["taps"]), int(about["width"])
        self._files.check(self.about)
        self._places: dict[str, tuple[Path, int]] = {}
        for part in self._files.parts():
            self._index(part)

    @classmethod
    def existing(cls, folder: str | Path) -> "FeatureStore":
        """The store in a folder, whatever its settings.

        Raises:
            ModelError: it is no folder of features, or a part cannot be read.
        """
        about = PartFolder(folder, CONTENTS).about()
        if about.get("dtype") not in DTYPES or not {"taps", "width"} <= about.keys():
            raise ModelError(f"{CONTENTS}={str(folder)!r}: its dtype, taps and width are not stated; capture again")
        return cls(folder, {name: value for name, value in about.items() if name != "format"})

    @staticmethod
    def bytes_needed(tokens: int, width: int, dtype: str, taps: int = 1) -> int:
        """Bytes of so many rows; scales included."""
        size = DTYPES[dtype].itemsize
        return tokens * (width * size + (4 * taps if size == 1 else 0))

    def __len__(self) -> int:
        return len(self._places)

    def has(self, name: str) -> bool:
        return name in self._places

    def check_room(self, tokens: int) -> None:
        """Refuse a disk that is too small for so many more rows.

        Raises:
            InvalidRequest: as above; nothing was written.
        """
        needed = self.bytes_needed(tokens, self._width, self._dtype, self._taps)
        check_disk(self.folder, needed, f"{CONTENTS} of {tokens} tokens")

    def write(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Add sequences, a part whenever enough have come, and one at the end or when whoever gives them fails.

        Args:
            pairs: names and features [T, width].

        Raises:
            ModelError: a part cannot be written, those before stay; values that the dtype cannot hold.
        """
        waiting: dict[str, dict[str, Tensor]] = {}
        size = 0
        try:
            for name, rows in pairs:
                assert rows.shape[1:] == (self._width,), "a row has what `about` says"
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
        """Features of a sequence.

        Args:
            name: of the sequence.
            dtype: to return them in.
            taps: of those that are stored, in the order they are wanted side by side; None for all.

        Returns:
            [T, width], or [T, taps * H].

        Raises:
            ModelError: not there, or in a part that cannot be read.
        """
        if name not in self._places:
            raise ModelError(f"{CONTENTS}={str(self.folder)!r}: none of {name!r}; capture them first")
        part, at = self._places[name]
        with opened(part) as (file, _):
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
        """The tensors that are stored for [T, width]."""
        kind = DTYPES[self._dtype]
        if kind.itemsize > 1:
            packed = {"rows": rows.detach().to("cpu", kind, copy=True).contiguous()}
        else:
            apart = rows.detach().cpu().float().unflatten(1, (self._taps, -1))  # [T, taps, H]
            scales = apart.abs().amax(dim=2) / torch.finfo(kind).max  # [T, taps]
            scales = scales.clamp(min=torch.finfo(torch.float32).tiny)  # of rows that are zero
            packed = {"rows": (apart / scales[:, :, None]).flatten(1).to(kind), "scales": scales}
        if not all(bool(tensor.float().isfinite().all()) for tensor in packed.values()):
            raise ModelError(f"{name!r}: its features are NaN or beyond {self._dtype}; choose dtype=bfloat16")
        return packed

    def _add(self, packed: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._files.claim(self.about)
        sequences = enumerate(packed.values())
        tensors = {f"{at}.{kind}": tensor for at, own in sequences for kind, tensor in own.items()}
        self._index(self._files.write(tensors, list(packed)))

    def _index(self, part: Path) -> None:
        """Remember where the sequences of a part are, whose tensors are all there."""
        kinds = ("rows", "scales") if DTYPES[self._dtype].itemsize == 1 else ("rows",)
        with opened(part) as (file, names):
            if {*file.keys()} != {f"{at}.{kind}" for at in range(len(names)) for kind in kinds}:
                raise contradiction(part)
            for at in range(len(names)):
                if file.get_slice(f"{at}.rows").get_shape()[1:] != [self._width]:
                    raise contradiction(part)
        self._places |= {name: (part, at) for at, name in enumerate(names)}
