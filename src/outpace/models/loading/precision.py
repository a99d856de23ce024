"""From a name to a target: resolve, read, check, choose dtype and device."""

import torch

from outpace.gpu.backend import runs_triton
from outpace.kernels.build import kernels_remedy, loaded_kernels, why_none
from outpace.kernels.linear import QUANTIZATIONS
from outpace.lib.errors import InvalidRequest
from outpace.models.layers.linear import can_pack

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


# The short names that vLLM and common usage accept for the same dtypes.
DTYPE_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def choose_device(device: str) -> torch.device:
    """The device to use; "auto" takes a GPU when there is one.

    Raises:
        InvalidRequest: the device does not exist here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InvalidRequest(f"device={device!r}: not a device; use 'auto', 'cpu' or 'cuda'") from error
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"device={device!r}: not supported; use 'auto', 'cpu' or 'cuda'")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise InvalidRequest(f"device={device!r}: no such GPU is visible to this build of torch; use 'cpu' or 'auto'")
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of weights; "auto" takes bfloat16 where the hardware computes in it, and on CPUs without instructions
    for it where compiled kernels read it: half the bytes, widened to float32 on the way. Else float32.

    Raises:
        InvalidRequest: the name is not one of DTYPES or "auto".
    """
    dtype = DTYPE_ALIASES.get(dtype, dtype)
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise InvalidRequest(f"dtype={dtype!r}: use 'auto', {', '.join(map(repr, DTYPES))}")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if can_pack(torch.bfloat16, device) or loaded_kernels() is not None else torch.float32


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What a device computes in with weights of a dtype: a CPU takes float32 for halves that it has no kernels for.

    The weights are as they were rounded; products are exact in float32 and faster than halves made of other
    instructions.
    """
    is_half = dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if is_half and device.type == "cpu" and not can_pack(dtype, device) else dtype


def check_quantization(quantize: str, dtype: torch.dtype, device: torch.device) -> None:
    """Whether a model can be quantised so here.

    Raises:
        InvalidRequest: not a way to quantise, not on this device, not with this dtype, or without the kernels for it.
    """
    if quantize not in QUANTIZATIONS:
        raise InvalidRequest(f"quantize={quantize!r}: use one of {', '.join(map(repr, QUANTIZATIONS))}")
    if quantize == "none":
        return
    if device.type != "cpu":
        raise InvalidRequest(f"quantize={quantize!r}: its kernels are for CPUs; use device='cpu' or quantize='none'")
    if not can_pack(dtype, device):
        raise InvalidRequest(f"quantize={quantize!r}: not beside {dtype}; use dtype='float32' or 'bfloat16'")
    if loaded_kernels() is None:
        raise InvalidRequest(f"quantize={quantize!r}: its kernels are not there: {why_none()}; {kernels_remedy()}")


def check_exact(device: torch.device) -> None:
    """Whether exact mode can be had on a GPU.

    Raises:
        InvalidRequest: its attention is a Triton kernel, and Triton is not there.
    """
    if device.type == "cuda" and not runs_triton(device):
        raise InvalidRequest(
            "exact=True: its attention needs Triton, which is not installed; install it or leave it out"
        )
