"""A tokenizer from the arrays of a GGUF file, as llama.cpp reads them.

Transformers takes 20 to 40 seconds for a vocabulary of 150,000, splits text by the model's family instead of
`tokenizer.ggml.pre`, and knows only some of the special tokens.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from outpace.lib.errors import ModelError
from outpace.models.plain_tokenizer import PlainTokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # of tokenizer.ggml.token_type
_IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unk": 0}
_SPACE = "▁"

# How vocabularies split text, each pattern within the parts that the ones before it left.
_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (_ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _LINES,)
_QWEN2 = (_ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _LINES,)
_DIGITS = (r"\p{N}", *_GPT2)
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LOWERED, _RAISED = f"{_WORD}{_UPPER}*{_LOWER}+", f"{_WORD}{_UPPER}+{_LOWER}*"
_PATHS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SENTENCES = " ?[^(\\s|.,!?…。，、।۔،)]+"  # noqa: RUF001
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2", "stablelm2"), _QWEN2),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "a.x-4.0", "mellum", "gigachat"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), (_SENTENCES,)),
    "seed-coder": (_ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "viking": (_SENTENCES, r"\p{N}"),
    "tekken": (f"{_LOWERED}|{_RAISED}|" + r"\p{N}" + _PATHS,),
    "gpt-4o": (f"{_LOWERED}{_ENDINGS}?|{_RAISED}{_ENDINGS}?|" + r"\p{N}{1,3}" + _PATHS,),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", *_GPT2, "[0-9][0-9][0-9]"),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", *_GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "tekken", "glm4")
"""Vocabularies in which a word that is a token is never split by merges."""
_BEGINS_WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "tekken")
_COMPOSED = ("qwen2",)  # vocabularies of text in Unicode's composed form
_NEVER_STRIP = ("<unk>", "<s>", "<|endoftext|>")
_ENDS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}
_ENDS |= {"<EOT>", "</s>", "<eos>", "<｜end▁of▁sentence｜>"}  # noqa: RUF001
"""Control tokens that end an answer in any file that has them, as llama.cpp ends it."""
_NAMED_ENDS = _ENDS - {"</s>"}
"""Tokens that end an answer, and are never shown, even if a file calls them user-defined; not "</s>", which is HTML in
Gemma's vocabulary."""


def tokenizer_of(values: Mapping[str, Any]) -> PlainTokenizer:
    """The tokenizer that a GGUF file's values describe.

    Raises:
        ModelError: a kind that is not BPE, such as WordPiece; arrays that are missing or contradict each other; an
            unknown way to split text.
    """
    kind = values.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"tokenizer.ggml.model={kind!r}: only gpt2 and llama are read; load the original folder")
    tokens, types = values.get("tokenizer.ggml.tokens"), values.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or (types is not None and len(types) != len(tokens)):
        raise ModelError("tokenizer.ggml.tokens and token_type do not fit together; download the file again")
    special = _special_tokens(values, tokens, _SENTENCEPIECE_IDS if kind == "llama" else {})
    backend = _byte_level(values, tokens) if kind == "gpt2" else _sentencepiece(values, tokens, special.get("unk"))
    defined = _chosen(tokens, types, _USER_DEFINED)
    control = _chosen(tokens, types, _CONTROL, _UNKNOWN) + [token for token in defined if token in _NAMED_ENDS]
    # The tokens of Phi 3 take the white space behind them, as the line breaks of its chat template.
    strips = kind == "llama" and values.get("general.architecture") == "phi3"
    _add(backend, control, True, strips)
    _add(backend, [token for token in defined if token not in _NAMED_ENDS], False, strips)
    _add_template(backend, values, special, tokens)
    template = values.get("tokenizer.chat_template")
    if template and (with_tools := values.get("tokenizer.chat_template.tool_use")):
        template = {"default": template, "tool_use": with_tools}
    return PlainTokenizer(backend, template, special, control)


def end_ids(values: Mapping[str, Any]) -> list[int]:
    """Ids that end an answer, beyond the file's EOS id: ends of a turn, by their key or by their text."""
    tokens, types = values.get("tokenizer.ggml.tokens"), values.get("tokenizer.ggml.token_type")
    named = [values.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom")]
    found = [one for one in named if isinstance(one, int)]
    if isinstance(tokens, list):
        ends = _ENDS.intersection(_chosen(tokens, types, _CONTROL))
        ends |= _NAMED_ENDS.intersection(_chosen(tokens, types, _USER_DEFINED))
        found += [number for number, token in enumerate(tokens) if token in ends] if ends else []
    return found


def _special_tokens(values: Mapping[str, Any], tokens: list[str], usual: Mapping[str, int]) -> dict[str, str]:
    """The token of each role. An ordinary word becomes neither padding nor a BOS that no text begins with, or it would
    be hidden wherever it occurs. Some files pad with id 0, which is "!" in Llama 3's vocabulary; files that llama.cpp
    saved from a model without a BOS name id 11, which is "," in Qwen's."""
    ids = {role: values.get(f"tokenizer.ggml.{key}", usual.get(role)) for role, key in _IDS.items()}
    found = {role: one for role, one in ids.items() if isinstance(one, int) and 0 <= one < len(tokens)}
    types = values.get("tokenizer.ggml.token_type")
    for role in ("pad",) if _begins_with_bos(values, tokens) else ("pad", "bos"):
        if types is not None and role in found and types[found[role]] == _NORMAL:
            found.pop(role)
    return {role: tokens[one] for role, one in found.items()}


def _begins_with_bos(values: Mapping[str, Any], tokens: list[str]) -> bool:
    """Whether every text begins with the BOS token."""
    usual = values["tokenizer.ggml.model"] == "llama" or _split_of(values, tokens) in _BEGINS_WITH_BOS
    return bool(values.get("tokenizer.ggml.add_bos_token", usual))


def _byte_level(values: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """A vocabulary whose tokens are bytes, written as GPT-2 does."""
    split = _split_of(values, tokens)
    if split == "default" and not values.get("tokenizer.ggml.pre"):
        warnings.warn(
            f"{values.get('general.name', 'a GGUF file')}: tokenizer.ggml.pre is missing, as in files of before May "
            "2024: text is split by llama.cpp's default rule, which is not that of Qwen or DeepSeek, and answers may "
            "be worse; take a newer file of this model",
            stacklevel=2,
        )
    if split not in _SPLITS:
        raise ModelError(
            f"tokenizer.ggml.pre={split!r}: how it splits text is not known; known are {', '.join(_SPLITS)}; load the "
            "model's original folder instead"
        )
    backend = Tokenizer(BPE(_ids(tokens), _merges(values), ignore_merges=split in _WHOLE_WORDS_FIRST))
    if split in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[split]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _split_of(values: Mapping[str, Any], tokens: list[str]) -> str:
    """How the file says that text is split. Old files of Llama 3, and some of Ollama's, do not say it, and are known by
    their tokens."""
    split: str = values.get("tokenizer.ggml.pre") or "default"
    is_llama3 = tokens[128_006:128_010:3] == ["<|start_header_id|>", "<|eot_id|>"]
    return "llama-bpe" if split == "default" and is_llama3 else split


def _sentencepiece(values: Mapping[str, Any], tokens: list[str], unknown: str | None) -> Tokenizer:
    """A SentencePiece vocabulary, whose scores say which tokens to join first."""
    scores = values.get("tokenizer.ggml.scores")
    if "tokenizer.ggml.merges" in values:
        merges = _merges(values)
    elif scores is not None and len(scores) == len(tokens):
        merges = _merges_by_score(tokens, scores.tolist())
    else:
        raise ModelError("tokenizer.ggml.scores is missing or has another length than the tokens; use another file")
    backend = Tokenizer(BPE(_ids(tokens), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    # Ollama's converter leaves it out, and Gemma's texts begin without a space.
    usual = not str(values.get("general.architecture")).startswith("gemma")
    begins = bool(values.get("tokenizer.ggml.add_space_prefix", usual))
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if begins else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if begins else steps)
    return backend


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _merges(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = values.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError("tokenizer.ggml.merges is missing; use another file of this model")
    pairs = [merge.partition(" ") for merge in merges]
    return [(first, second) for first, _, second in pairs]


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, the best first; of one token's pairs, the one of the best parts."""
    ids = _ids(tokens)
    found = []
    for token, number in ids.items():
        for cut in range(1, len(token)):
            first, second = ids.get(token[:cut]), ids.get(token[cut:])
            if first is not None and second is not None:
                found.append((-scores[number], number, -scores[first], -scores[second], cut))
    return [(tokens[number][:cut], tokens[number][cut:]) for _, number, _, _, cut in sorted(found)]


def _chosen(tokens: list[str], types: np.ndarray[Any, Any] | None, *kinds: int) -> list[str]:
    return [] if types is None else [tokens[place] for place in np.flatnonzero(np.isin(types, kinds))]


def _add(backend: Tokenizer, tokens: list[str], special: bool, strips: bool) -> None:
    """Add tokens that stand for themselves in any text; special ones are never shown."""
    own = [
        AddedToken(token, normalized=False, special=special, rstrip=strips and token not in _NEVER_STRIP)
        for token in tokens
    ]
    backend.add_special_tokens(own) if special else backend.add_tokens(own)


def _add_template(backend: Tokenizer, values: Mapping[str, Any], special: Mapping[str, str], tokens: list[str]) -> None:
    """The tokens that every text begins and ends with."""
    is_pieces = values["tokenizer.ggml.model"] == "llama"
    wanted = {"bos": _begins_with_bos(values, tokens), "eos": values.get("tokenizer.ggml.add_eos_token", False)}
    begin, end = ([special[role]] if wanted[role] and role in special else [] for role in ("bos", "eos"))
    template = processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, *(f"{token}:1" for token in begin), "$B:1", *(f"{token}:1" for token in end)],
        special_tokens=[(token, tokens.index(token)) for token in {*begin, *end}],
    )
    steps = [] if is_pieces else [processors.ByteLevel(trim_offsets=False)]
    backend.post_processor = processors.Sequence([*steps, template])
