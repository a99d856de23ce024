"""The formats of tensors in GGUF files, by their numbers there. Importing the `gguf` package takes 0.2 s."""

from enum import IntEnum


class BlockFormat(IntEnum):
    """A format of tensors, equal to gguf's `GGMLQuantizationType`."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41


BLOCK_SIZES = {
    BlockFormat.F32: (1, 4),
    BlockFormat.F16: (1, 2),
    BlockFormat.Q4_0: (32, 18),
    BlockFormat.Q4_1: (32, 20),
    BlockFormat.Q5_0: (32, 22),
    BlockFormat.Q5_1: (32, 24),
    BlockFormat.Q8_0: (32, 34),
    BlockFormat.Q8_1: (32, 40),
    BlockFormat.Q2_K: (256, 84),
    BlockFormat.Q3_K: (256, 110),
    BlockFormat.Q4_K: (256, 144),
    BlockFormat.Q5_K: (256, 176),
    BlockFormat.Q6_K: (256, 210),
    BlockFormat.Q8_K: (256, 292),
    BlockFormat.IQ2_XXS: (256, 66),
    BlockFormat.IQ2_XS: (256, 74),
    BlockFormat.IQ3_XXS: (256, 98),
    BlockFormat.IQ1_S: (256, 50),
    BlockFormat.IQ4_NL: (32, 18),
    BlockFormat.IQ3_S: (256, 110),
    BlockFormat.IQ2_S: (256, 82),
    BlockFormat.IQ4_XS: (256, 136),
    BlockFormat.I8: (1, 1),
    BlockFormat.I16: (1, 2),
    BlockFormat.I32: (1, 4),
    BlockFormat.I64: (1, 8),
    BlockFormat.F64: (1, 8),
    BlockFormat.IQ1_M: (256, 56),
    BlockFormat.BF16: (1, 2),
    BlockFormat.TQ1_0: (256, 54),
    BlockFormat.TQ2_0: (256, 66),
    BlockFormat.MXFP4: (32, 17),
    BlockFormat.NVFP4: (64, 36),
    BlockFormat.Q1_0: (128, 18),
}
"""Numbers in a block, and its bytes."""
