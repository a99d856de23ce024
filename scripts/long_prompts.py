"""Prompts of a given length, for measuring long contexts: prose of documents, transcripts, or source files of Python.

python scripts/long_prompts.py MODEL OUT.jsonl LENGTH COUNT [PROMPTS.jsonl [--talk]]

Texts follow each other until LENGTH tokens of MODEL are reached, and are cut at the end of a line. Without a file of
prompts they are modules of this Python's standard library, whose code a model is to continue.

`--talk` makes a *substitute* for transcripts of meetings (such as QMSum's), not real ones: messages that people wrote
in conversations with assistants, one a line, spoken by four speakers in turn. A conversation of several messages is a
topic; messages with code and the assistants' answers are left out. So lines are as long as spoken ones, but they are
no replies.
"""

import argparse
import json
import sysconfig
from collections.abc import Iterator
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

from outpace.models.loading.load import load_vocabulary_facts
from outpace.models.tokenizer import TextCodec

SUMMARISE = "Write a detailed summary of the texts above, one paragraph for each."
CODE = set("{}<>=\\|_")  # characters of messages that are not speech
SUMMARISE_TALK = "Summarise the whole meeting."
CONTINUE = "Continue the last file above: write the next functions in the same style."


def modules() -> Iterator[str]:
    """The larger modules of the standard library, in order of their names."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) > 8000:
            yield f"# {path.name}\n{text}"


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """A workload's prompts."""
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)  # str.splitlines would also split at U+2028, which texts have


def documents(path: Path) -> Iterator[str]:
    """The texts of a workload's prompts, without the instruction of the first line."""
    for prompt in lines_of(path):
        yield prompt["turns"][0].partition("\n\n")[2]


def conversations(path: Path) -> Iterator[str]:
    """Transcripts made of messages with ids `CONVERSATION_NUMBER`: a line per message, at least two in each."""
    prompts = [prompt for prompt in lines_of(path) if "_" in prompt["id"]]
    messages = [(*prompt["id"].rpartition("_")[::2], prompt["turns"][0]) for prompt in prompts]
    messages.sort(key=lambda message: (message[0], int(message[1])))
    speakers = cycle("ABCD")
    for _, group in groupby(messages, key=lambda message: message[0]):
        spoken = [" ".join(text.split()) for _, _, text in group if text.isascii() and not CODE & set(text)]
        if len(spoken) > 1:
            yield "\n".join(f"Speaker {next(speakers)}: {text}" for text in spoken)


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
    parser.add_argument("--talk", action="store_true", help="make transcripts of the prompts, which are messages")
    given = parser.parse_args()
    if given.talk and given.prompts is None:
        parser.error("--talk needs PROMPTS.jsonl, whose ids are CONVERSATION_NUMBER")
    codec, _, _ = load_vocabulary_facts(given.model)
    if given.prompts is None:
        kind, request, made = "code", CONTINUE, modules()
    elif given.talk:
        kind, request, made = "talk", SUMMARISE_TALK, conversations(given.prompts)
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
