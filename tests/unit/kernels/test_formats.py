"""The table of formats of GGUF files."""

from gguf.constants import GGML_QUANT_SIZES

from outpace.kernels.formats import BlockFormat


def test_formats_are_those_of_the_gguf_package() -> None:
    """Guards against a wrong number or size in the table that replaces a slow import."""
    stock = {kind.name: (int(kind), *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    own = {kind.name: (int(kind), kind.size, kind.width) for kind in BlockFormat}
    assert own == {name: stock[name] for name in own}
    assert {"F32", "Q4_K", "Q6_K", "MXFP4"} <= own.keys()
