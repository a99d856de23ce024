"""The formats of tensors in GGUF files, by their numbers there, and the bytes that they take."""

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

BlockFormat = GGMLQuantizationType


def is_whole(kind: BlockFormat, count: int) -> bool:
    """Whether so many numbers are whole blocks of a format."""
    return count % GGML_QUANT_SIZES[kind][0] == 0


def bytes_of(kind: BlockFormat, count: int) -> int:
    """Bytes of so many numbers in whole blocks of a format."""
    size, width = GGML_QUANT_SIZES[kind]
    return count // size * width
