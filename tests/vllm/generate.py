"""Run as a program: one engine, in as many processes as asked for; its answers are a line of JSON."""

import json
import os
import sys

from tests.vllm.engines import engine


def main(asked: str) -> None:
    """`asked`: JSON of "model", "speculation", "settings", "prompts" and "length"."""
    wanted = json.loads(asked)
    with engine(wanted["model"], wanted["speculation"], **wanted["settings"]) as made:
        answers = made.generate(wanted["prompts"], wanted["length"])
        print(json.dumps({"answers": answers, "counts": made.counts()}), flush=True)
    os._exit(0)  # vLLM's workers may take their time


if __name__ == "__main__":
    main(sys.argv[1])
