"""Choose the device and the precision of a model."""

import torch

from outpace.gpu.backend import runs_triton
from outpace.kernels.attention import KV_CACHE_DTYPES
from outpace.kernels.build import kernels_remedy, loaded_kernels, why_none
from outpace.lib.checks import shown
from outpace.lib.errors import InvalidRequest
from outpace.models.layers.linear import can_pack

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Short names that vLLM and others accept.
DTYPE_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def choose_device(device: str) -> torch.device:
    """The device to use; "auto" takes a GPU if there is one.

    Raises:
        InvalidRequest: there is no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InvalidRequest(f"device={shown(device)}: not a device; use 'auto', 'cpu' or 'cuda'") from error
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"device={shown(device)}: not supported; use 'auto', 'cpu' or 'cuda'")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        remedy = "use 'cpu' or 'auto'"
        raise InvalidRequest(f"device={shown(device)}: no such GPU is visible to this build of torch; {remedy}")
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype that weights are rounded to.

    "auto" takes bfloat16 where the hardware computes in it, and on other CPUs where compiled kernels read bfloat16
    (half the memory traffic) and compute in float32; else float32.

    Raises:
        InvalidRequest: the name is not one of DTYPES or "auto".
    """
    dtype = DTYPE_ALIASES.get(dtype, dtype)
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise InvalidRequest(f"dtype={shown(dtype)}: use 'auto', {', '.join(map(repr, DTYPES))}")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if can_pack(torch.bfloat16, device) or loaded_kernels() is not None else torch.float32


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that a device computes in with weights of `dtype`: float32 for 16-bit weights on a CPU without
    instructions for them, where it is exact and faster than emulation. The weights stay rounded to `dtype`."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if is_half and device.type == "cpu" and not can_pack(dtype, device) else dtype


QUANTIZATIONS = ("auto", "file", "none", "int8", "int4")


def choose_quantization(quantize: str, dtype: torch.dtype, device: torch.device, is_gguf: bool) -> str:
    """The format of weights in products: "file", "none", "int8" or "int4".

    Args:
        quantize: one of `QUANTIZATIONS`; "auto" is "file" where it can be, else "none".
        dtype: that the device computes in.
        device: of the model.
        is_gguf: its weights are in a GGUF file.

    Raises:
        InvalidRequest: an unknown quantisation, or one that this device, dtype or installation does not have.
    """
    if quantize not in QUANTIZATIONS:
        raise InvalidRequest(f"quantize={shown(quantize)}: use one of {', '.join(map(repr, QUANTIZATIONS))}")
    if quantize == "auto":
        can_multiply = device.type == "cpu" and can_pack(dtype, device) and loaded_kernels() is not None
        return "file" if is_gguf and can_multiply else "none"
    if quantize == "none":
        return quantize
    if quantize == "file" and not is_gguf:
        raise InvalidRequest("quantize='file': is for a GGUF file; use quantize='none', 'int8' or 'int4' here")
    _check_kernels(f"quantize={quantize!r}", "quantize='none'", dtype, device)
    return quantize


def check_kv_cache_dtype(kv_cache_dtype: str, dtype: torch.dtype, device: torch.device) -> None:
    """Check the format of keys and values: "auto" or one of `KV_CACHE_DTYPES`.

    Args:
        dtype: that the device computes in.

    Raises:
        InvalidRequest: another word, or a format that this device, dtype or installation does not have.
    """
    words = ("auto", *KV_CACHE_DTYPES)
    if kv_cache_dtype not in words:
        raise InvalidRequest(f"kv_cache_dtype={shown(kv_cache_dtype)}: use one of {', '.join(map(repr, words))}")
    if kv_cache_dtype != "auto":
        _check_kernels(f"kv_cache_dtype={kv_cache_dtype!r}", "kv_cache_dtype='auto'", dtype, device)


def _check_kernels(option: str, instead: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse an option that compiled kernels are needed for where there are none."""
    if device.type != "cpu":
        raise InvalidRequest(f"{option}: its kernels are for CPUs; use device='cpu' or {instead}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise InvalidRequest(f"{option}: not with {dtype}; use dtype='float32' or 'bfloat16'")
    if loaded_kernels() is None:
        raise InvalidRequest(f"{option}: its kernels are not there: {why_none()}; {kernels_remedy()}")


def check_exact(device: torch.device) -> None:
    """Check that a device has exact mode.

    Raises:
        InvalidRequest: a GPU without Triton, which its attention needs.
    """
    if device.type == "cuda" and not runs_triton(device):
        raise InvalidRequest(
            "exact=True: its attention needs Triton, which is not installed; install it or leave it out"
        )
