"""The structures that the compiled kernels read, as `cpp/*.h` declare them."""

import ctypes
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T", bound="ctypes._CData")


@lru_cache(maxsize=512)
def array(kind: type[T], count: int) -> "type[ctypes.Array[T]]":
    """The type of arrays of `count` items. ctypes drops such a type with its last array, and each is a reference cycle:
    if every pass made new ones, they would wait for the garbage collector."""
    return kind * count  # type: ignore[operator,return-value]  # typeshed knows it of no bounded variable


class PanelMatrix(ctypes.Structure):
    """A weight in panels (product.h)."""


PanelMatrix._fields_ = [
    *((name, c_void_p) for name in ("panels", "scales", "bias")),
    ("next", POINTER(PanelMatrix)),
    *((name, c_int32) for name in ("outputs", "inputs", "kind", "block")),
]


class AttentionSight(ctypes.Structure):
    """What a layer lets a row see (slots.h)."""

    _fields_ = [("window", c_int32), ("softcap", c_float), ("scaling", c_float), ("causal", c_int32)]


class Store(ctypes.Structure):
    """Keys and values (slots.h)."""

    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales", "key_offsets")),
        *((name, c_int64) for name in ("layer_stride", "slot_stride", "head_stride")),
        *((name, c_int32) for name in ("kind", "head_dim")),
    ]


class Part(ctypes.Structure):
    """One request's rows in a pass (slots.h)."""

    _fields_ = [
        *((name, c_void_p) for name in ("visible", "positions", "view")),
        *((name, c_int32) for name in ("slot", "start", "count", "committed", "scratch")),
        *((name, c_int32) for name in ("viewed", "view_layer_stride", "view_head_stride")),
    ]


class Layer(ctypes.Structure):
    """A decoder's layer (decoder.h)."""

    _fields_ = [
        *((name, PanelMatrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "embedding_norm", "cosines", "sines")),
        ("sight", AttentionSight),
        ("rotated", c_int32),
    ]


class Decoder(ctypes.Structure):
    """A decoder (decoder.h)."""

    _fields_ = [
        ("layers", POINTER(Layer)),
        ("last_norm", c_void_p),
        *((name, c_int32) for name in ("count", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        *((name, c_int32) for name in ("activation", "norms_all_heads", "adds_to_normed")),
        ("eps", c_float),
    ]


class Pass(ctypes.Structure):
    """A pass over packed rows (decoder.h)."""

    _fields_ = [
        ("kv", Store),
        ("parts", POINTER(Part)),
        *((name, c_void_p) for name in ("x", "embeddings", "raw")),
        ("taps", POINTER(c_void_p)),
        *((name, c_int32) for name in ("part_count", "rows")),
    ]


class CausalHead(ctypes.Structure):
    """Domino's head (domino_head.h)."""

    _fields_ = [
        *((name, PanelMatrix) for name in ("of_input", "of_state", "down", "up")),
        *((name, c_int32) for name in ("hidden", "state", "rank")),
    ]


class KeyedDrawsStruct(ctypes.Structure):
    """Keyed draws for which rows of logits are drafts (topk.h)."""

    _fields_ = [*((name, c_void_p) for name in ("keys", "ids", "draw_of_row", "temperatures")), ("count", c_int32)]
    kept: object = None
    """What the addresses point to."""


class Correction(ctypes.Structure):
    """Rows of a causal head that read one more token (domino_head.h)."""

    _fields_ = [
        *((name, c_void_p) for name in ("embeddings", "before", "outputs", "base", "after", "logits", "best", "ids")),
        ("draws", POINTER(KeyedDrawsStruct)),
        *((name, c_int32) for name in ("rows", "wanted")),
    ]


class Layout(ctypes.Structure):
    """The index of each feature's first weight (growth.h)."""

    _fields_ = [
        *((name, c_int32) for name in ("drafted", "passed_over", "undrafted", "paired", "outranked", "unpaired")),
        *((name, c_int32) for name in ("ranked", "unranked", "matched", "unmatched", "noisy", "quiet", "noises")),
        ("match_count", c_int32),
        ("share_count", c_int32),
        ("matches", c_int32 * 8),
        ("drafted_from", c_double * 24),
    ]


class Pairs(ctypes.Structure):
    """Rows of the transition matrix by the last two tokens (growth.h)."""

    _fields_ = [("keys", c_void_p), ("rows", c_void_p), ("factor", c_uint64), ("bits", c_int32)]


class Growing(ctypes.Structure):
    """One request's tree (growth.h)."""

    _fields_ = [
        ("text", c_void_p),
        ("successors", c_void_p),
        ("pairs", POINTER(Pairs)),
        *((name, c_void_p) for name in ("weights", "draft_tokens", "draft_parents", "draft_scores", "endings")),
        *((name, c_void_p) for name in ("noise", "least_gains", "tokens", "parents", "drafted", "origins")),
        *((name, c_void_p) for name in ("gains", "named_from", "named", "features")),
        *((name, c_int64) for name in ("vocabulary", "before")),
        *((name, c_int32) for name in ("draft_count", "ending_count", "least_count", "budget", "max_depth")),
        *((name, c_int32) for name in ("count", "expanded")),
    ]


class Lattice(ctypes.Structure):
    """One request's block with candidates for every depth (lattice.h)."""

    _fields_ = [
        *((name, c_void_p) for name in ("pending", "a", "b", "places", "ids", "gates", "base", "others", "sharpness")),
        *((name, c_void_p) for name in ("noise", "endings", "scores", "log_mass", "tokens", "parents", "path_scores")),
        ("temperature", c_float),
        *((name, c_int32) for name in ("depth", "width", "rank", "ending_count", "budget", "max_depth", "count")),
    ]


class Learning(ctypes.Structure):
    """The tokens that followed accepted nodes (growth.h)."""

    _fields_ = [
        *((name, c_void_p) for name in ("weights", "squares", "named_from", "named", "features", "nodes", "said")),
        ("rate", c_double),
        *((name, c_int32) for name in ("count", "size")),
    ]


class Drawn(ctypes.Structure):
    """A keyed draw (draw.h)."""

    _fields_ = [
        *((name, c_void_p) for name in ("logits", "top_ids", "top_logits")),
        ("temperature", c_double),
        ("key", c_int32 * 2),
        *((name, c_int32) for name in ("width", "top_count", "is_bfloat16")),
        ("token", c_int64),
    ]
