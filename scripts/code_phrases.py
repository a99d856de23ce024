"""How prompts about code are worded, for `make_code_prompts.py`."""

import re
from itertools import pairwise

PLUMBING = set(
    re.findall(
        r"\S+",
        """
        api axis backend browser bytecode callback cls codec config console dataframe decorator deprecated
        directory django dom domain environ estimator expr figure file files filesystem fixture frame gf hook
        http importer kernel legacy loader locale lock logger module modules ndarray numpy password path paths
        permission plot plugin polynomials request response schema self series setup socket stderr stdout
        stream subclass subclasses sympy tensor thread traceback url widget wrapper zz
        """,
    )
)
VAGUE = re.compile(
    r"\b(see |same as|equivalent|this module|version of|wrapper|similar to|as above|internal|instance|"
    r"this class|this method|helper|used by|used to|used for|convenience|the given spec|object model|cf\.)",
    re.IGNORECASE,
)
VERBS = set(
    re.findall(
        r"\S+",
        """
        add adjust anonymize append apply approximate arrange assign average build calculate capitalize cast
        center change check choose clamp clean clear clip collapse collect combine compare compose compress
        compute concatenate construct convert copy correct count create crop cut cycle darken deal decide
        decode decompose decrypt delete derive detect determine differentiate display distribute divide draw
        drop duplicate encode encrypt enumerate escape estimate evaluate exchange expand extract factor fill
        filter find flatten flip fold follow format generate get give grade group guess hide ignore implement
        increase increment indent insert interleave interpolate intersect invert iterate join justify keep
        label leave list locate look lowercase make map mark match measure merge mix move multiply negate
        normalize obtain order pack pad pair parse partition pay perform permute pick place play pop prepend
        print process produce prune put quote raise rank read rearrange recover reduce remove rename render
        repeat replace rescale restore return reverse right-align rotate round sample scale scan search select
        set shift shorten shuffle simplify simulate skip slice solve sort split square strip subtract sum
        summarize swap take tell test toggle tokenize transcribe transform translate transpose traverse treat
        trim truncate try turn unescape unflatten unpack update validate verify walk wrap write yield zip
        """,
    )
)
ALWAYS_VERBS = {"append", "convert", "ignore", "keep", "label", "leave", "raise", "return", "skip", "treat"}
ASKED = {
    "complete": [
        "Complete the following Python function. Reply with the full function in a code block.\n\n{fenced}",
        "{fenced}\n\nFinish this function. Give the whole function, not only its body.",
        "Write the body of the function below so that it does what the docstring describes.\n\n{fenced}",
        "Here is a function with a docstring but no body. Implement it and answer with the finished code.\n\n{fenced}",
        "Implement `{name}`:\n\n{fenced}\n\nAnswer with code only.",
        "Please write the missing implementation of `{name}` and briefly say how it works.\n\n{fenced}",
        "Read the signature and the docstring, then write the complete {noun} in a Python code block.\n\n{fenced}",
        "{code}\n    # your code here\n\nReplace the comment with a working implementation and show the complete code.",
        "Given this stub, reply with a full implementation that can be run as it is, imports included.\n\n{fenced}",
        "Continue this code:\n\n{fenced}",
    ],
    "implement": [
        "Write a Python function `{signature}` that {does}.{rest}{tests}",
        "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
        "```\nWrite a function `{name}` that {does}.{rest}\n{asserts}\n```",
        "I need a Python function called `{name}` that {does}.{rest} Its signature is `{signature}`.{tests}",
        "{order}{rest}\n\nUse the signature `def {signature}:` and reply with the code in one block.{tests}",
        "How can I write a function in Python that {does}?{rest} Call it `{name}`.{tests}",
        "Task: {order}{rest}\n\nWrite `{signature}` in Python.{tests}",
        "You are an expert Python programmer. Write a function `{signature}` that {does}.{rest}{tests}",
        "Implement `{signature}` in Python. The function {does}.{rest} Handle edge cases sensibly.{tests}",
        "Solve this with a Python function named {name}.\n\n{order}{rest}{tests}",
        "Write a function that {does}.{rest}{tests}",
    ],
    "explain": [
        "Explain what this Python code does.\n\n{fenced}",
        "What does the function `{name}` return, and how does it work?\n\n{fenced}",
        "{fenced}\n\nWalk me through this function step by step.",
        "Explain the following code to a beginner in a few sentences.\n\n{fenced}",
        "{fenced}\n\nWhat is the time complexity of this, and why? Describe what it computes first.",
        "I found this in a code base I am new to. Summarize its purpose, its inputs and its output.\n\n{fenced}",
        "Write a docstring for this function, with an example, and explain any line that is not obvious.\n\n{fenced}",
        "Give an example call of `{name}` and explain how the result comes about.\n\n{fenced}",
    ],
    "tests": [
        "Write unit tests with pytest for this function.\n\n{fenced}",
        "{fenced}\n\nWrite a `unittest.TestCase` that covers the normal cases and the edge cases of `{name}`.",
        "Add doctests to the docstring of this function. Reply with the whole function.\n\n{fenced}",
        "Write five assert statements that check the behaviour of `{name}`.\n\n{fenced}",
        "Which edge cases should be tested here? Write a test for each.\n\n{fenced}",
        "Please write a parametrized pytest test for the following code.\n\n{fenced}",
        "{fenced}\n\nWrite tests for this, with one comment each on what is being checked.",
    ],
    "bug": [
        "This function has a bug. Find it and fix it.\n\n{fenced}\n\nWhat it should do: {order}",
        "{fenced}\n\nThe code above does not work as described: {order} What is wrong? Show the corrected function.",
        "A colleague wrote this. {order} It gives wrong results. Explain the mistake and correct it.\n\n{fenced}",
        "Debug the following Python code. Expected behaviour: {order}\n\n{fenced}",
        "My function `{name}` fails its tests. What did I do wrong?\n\n{order}\n\n{fenced}",
        "Review this code. {order} There is one mistake in it; point it out and give the fixed version.\n\n{fenced}",
        "Fix the bug in this code and reply with the full corrected function.\n\n{fenced}\n\nDescription: {order}",
    ],
}


def in_words(doc: str) -> tuple[str, str, str] | None:
    """What a docstring's first paragraph says: as an order ("Return the sum."), after "that" ("returns the sum"), and
    the sentences after the first. None where it does not begin with a verb."""
    first = re.sub(r"\s+", " ", re.sub(r"\*(\w+)\*", r"`\1`", doc.split("\n\n")[0])).strip()
    first = re.sub(r"^(This (function|method)|Function to|Will|It|A function (that|to))\s+", "", first)
    if VAGUE.search(first) or ">>>" in first or re.search(":param|@param|@return", first):
        return None
    match = re.match(r"(.{12,260}?)(?:[.:](?=\s+[A-Z`]|$)|$)(.*)", first)
    if not match or not 4 <= len(match[1].split()) <= 45 or len(match[2]) > 350:
        return None
    given = re.match(rf"(?:Given|For|From|Starting) (.+?), (({'|'.join(sorted(VERBS))}) .*)", match[1])
    if given and (told := in_words(given[2] + "." + match[2])):
        return f"{match[1]}.", f"{told[1]}, {first.split()[0].lower()} {given[1]}", match[2].rstrip()
    words = match[1].split(" ")
    verb = base_form(words[0].rstrip(","))
    if verb is None:
        return None
    comma = "," if words[0].endswith(",") else ""
    bases, thirds = [verb.capitalize() + comma], [third_person(verb) + comma]
    for before, word in pairwise(words):
        second = before in ("and", "or") and (len(thirds) == 2 or word.rstrip(",") in ALWAYS_VERBS)
        other = base_form(word.rstrip(",")) if second else None
        comma = "," if word.endswith(",") else ""
        bases.append(other + comma if other else word)
        thirds.append(third_person(other) + comma if other else word)
    return " ".join(bases).rstrip(".") + ".", " ".join(thirds).rstrip("."), match[2].rstrip()


def base_form(word: str) -> str | None:
    word = word.lower()
    for verb in (word, word[:-1], word[:-2], word[:-3] + "y"):
        if verb in VERBS and word in (verb, third_person(verb)):
            return verb
    return None


def third_person(verb: str) -> str:
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "z", "o")) else "s")
