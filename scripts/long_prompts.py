"""Prompts of a given length, for measuring long contexts: prose of documents, or source files of Python.

python scripts/long_prompts.py MODEL OUT.jsonl LENGTH COUNT [PROMPTS.jsonl]

Texts follow each other until LENGTH tokens of MODEL are reached, and are cut at the end of a line. Without a file of
prompts they are modules of this Python's standard library, whose code a model is to continue.
"""

import argparse
import json
import sysconfig
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from outpace.models.loading.load import load_vocabulary_facts
from outpace.models.tokenizer import TextCodec

SUMMARISE = "Write a detailed summary of the texts above, one paragraph for each."
CONTINUE = "Continue the last file above: write the next functions in the same style."


def modules() -> Iterator[str]:
    """The larger modules of the standard library, in order of their names."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) > 8000:
            yield f"# {path.name}\n{text}"


def documents(path: Path) -> Iterator[str]:
    """The texts of a workload's prompts, without the instruction of the first line."""
    with path.open(encoding="utf-8") as file:
        for line in file:  # str.splitlines would also split at U+2028, which texts have
            yield json.loads(line)["turns"][0].partition("\n\n")[2]


def cut(codec: TextCodec, text: str, length: int) -> str:
    """The longest part of a text that has at most so many tokens and ends with a line."""
    lines = text.splitlines(keepends=True)
    low, high = 0, len(lines)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(codec.encode("".join(lines[:middle]))) <= length else (low, middle - 1)
    return "".join(lines[:low])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("length", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("prompts", type=Path, nargs="?")
    given = parser.parse_args()
    codec, _, _ = load_vocabulary_facts(given.model)
    if given.prompts is None:
        kind, request, made = "code", CONTINUE, modules()
    else:
        kind, request, made = given.prompts.stem, SUMMARISE, documents(given.prompts)
    texts = cycle(list(made))
    with given.out.open("w", encoding="utf-8") as file:
        for index in range(given.count):
            text = ""
            while len(codec.encode(text)) < given.length:
                text += next(texts) + "\n"
            prompt = f"{cut(codec, text, given.length)}\n{request}"
            file.write(json.dumps({"id": f"{kind}-{given.length}-{index}", "turns": [prompt]}) + "\n")


if __name__ == "__main__":
    main()
