"""What user and agent say (floor 3): varied sentences whose facts are visible at the time they are said.

A template is filled with ``str.format``; ``{s}`` is the symptom as a clause ("tests/test_a.py::test_b fails").
"""

from __future__ import annotations

import random
from collections.abc import Mapping

SYMPTOMS: Mapping[str, tuple[str, ...]] = {
    "fix_test_failure": (
        "{test} fails",
        "{test} fails with a wrong result",
        "the assertion in {test} does not hold",
        "{test} gets another value than it expects",
        "the check in {test} fails",
        "{test} is red, the result is not what it should be",
    ),
    "debug_runtime_error": (
        "{test} crashes with {error}",
        "{test} stops with {error}",
        "{test} dies with {error}",
        "{error} comes up in {test}",
        "{test} ends in {error}",
        "{test} blows up, it says {error}",
    ),
    "implement_function": (
        "{test} fails because a function is not implemented",
        "{test} hits a function without a body",
        "{test} needs a function that is still empty",
        "something that {test} calls is not written yet",
        "{test} runs into a function that still has to be written",
        "a function body is missing and {test} fails",
    ),
}

INSTRUCTIONS: Mapping[str, tuple[str, ...]] = {
    "run": (
        "{S}. Please fix it.",
        "Can you repair this? {S}.",
        "{S}, please correct the code.",
        "Please make this work again: {s}.",
        "Since the last change {s}. Fix the cause.",
        "Our build is red: {s}. Repair the code, not the test.",
        "See why {s} and put it right.",
    ),
    "paste": (
        "{S}:\n{trace}\nPlease fix it.",
        "I get this output, {s}:\n{trace}\nCan you repair it?",
        "{trace}\n{S}, the output is above. Correct it please.",
        "Here is the traceback, {s}:\n{trace}\nPlease put it right.",
        "This is what I see:\n{trace}\nIn short, {s}. Fix the cause.",
        "Failing output below, {s}.\n{trace}",
    ),
    "where": (
        "Find where `{name}` is defined and repair it: {s}.",
        "I do not know which file `{name}` lives in. {S}. Please find it and fix it.",
        "Search for `{name}`, something is wrong with it: {s}.",
        "Where is `{name}`? It is the reason why {s}. Locate it and correct it.",
        "{S}. The cause is `{name}`, wherever that is defined.",
        "Look up `{name}` and correct it, because {s}.",
    ),
    "named": (
        "`{name}` in {file} is wrong: {s}. Please correct it.",
        "{S}. The cause is `{name}` in {file}.",
        "Please repair `{name}` in {file}, because {s}.",
        "There is a mistake in `{name}` ({file}), so {s}.",
        "Open {file} and fix `{name}`: {s}.",
        "In {file} the function `{name}` does not do what it should, {s}.",
    ),
    "cursor": (
        "The function under my cursor is wrong: {s}. Please correct it.",
        "{S}. The mistake is right here where my cursor is.",
        "Please fix this function, the one I have open: {s}.",
        "Something around the cursor is wrong, {s}. Repair it.",
        "I am in the function that is to blame: {s}. Fix it here.",
        "This place is wrong, {s}. Please put it right.",
    ),
    "exact": (
        "In {file} line {line} replace `{old}` by `{new}`: {s}.",
        "{S}. Change `{old}` to `{new}` in {file}, line {line}.",
        "Line {line} of {file} says `{old}`, it must be `{new}`. That is why {s}.",
        "Please write `{new}` instead of `{old}` on line {line} of {file}, {s}.",
        "{file}:{line} has `{old}` where `{new}` belongs, so {s}. Change that.",
        "Just change `{old}` into `{new}` at {file}:{line}; {s}.",
    ),
    "undo": (
        "I changed `{new}` to `{old}` on line {line} of {file}, but still {s}. Undo that, check that it fails as "
        "before, then fix the real cause.",
        "{S}. My attempt (`{old}` instead of `{new}` at {file}:{line}) did not help: take it back, run the test, and "
        "look for the real reason.",
        "Put `{new}` back where I wrote `{old}` ({file}, line {line}), it did not help. See the failure again and fix "
        "it: {s}.",
        "Revert my try on line {line} of {file}, `{old}` has to be `{new}` again. It failed before too: {s}. Repair.",
        "My edit at {file}:{line} from `{new}` to `{old}` was no use, {s}. Take it out, confirm that, then solve it.",
        "Please take back `{old}` on line {line} of {file} (it was `{new}`). It failed before too: {s}. Then find the "
        "cause.",
    ),
    "test": (
        "Read {test} first, then fix what it checks: {s}.",
        "{S}. Start by reading that test, then correct the code.",
        "Have a look at the test itself before anything else. {S}.",
        "First show me what {test} does, then repair the code, because {s}.",
        "Begin with the source of the test. {S}, please fix it.",
        "Before you change or run anything, read the test: {s}.",
    ),
    "caller": (
        "Start at `{caller}` in {file}. The mistake is in a helper that it calls: {s}.",
        "`{caller}` in {file} is fine itself, but something it calls is wrong: {s}.",
        "{S}. It goes through `{caller}` ({file}), look there and then at what it calls.",
        "Look at `{caller}` in {file} and follow the call to the helper that is wrong, {s}.",
        "The trouble is one level below `{caller}` in {file}: {s}. Read it, then go to the helper.",
        "Follow `{caller}` ({file}) down to the function that is wrong. {S}.",
    ),
}

WISHES: Mapping[str, tuple[str, ...]] = {
    "recheck": (
        "Look at the changed lines again before you run the tests.",
        "After an edit, read the place once more before testing.",
        "Show me the changed lines before any test run.",
        "Re-read what you changed first, then run the tests.",
        "Please check the file again after the change, then test.",
        "Read the edited lines back before you run anything.",
    ),
    "neighbour": (
        "Afterwards make sure that {neighbour} still passes.",
        "{neighbour} must keep working, check it at the end.",
        "When it is fixed, run {neighbour} as well.",
        "At the end also run {neighbour}.",
        "And see that {neighbour} is still green afterwards.",
        "Then verify that {neighbour} was not broken by it.",
    ),
    "whole": (
        "At the end run all of {testfile}.",
        "Finish with a run of the whole file {testfile}.",
        "When it is fixed, run everything in {testfile}.",
        "Then run the complete {testfile} as well.",
        "Close with all tests of {testfile}.",
        "Afterwards the whole of {testfile} should be run once.",
    ),
    "norun": (
        "No need to run the tests.",
        "Do not run anything, I will test it myself.",
        "Only edit, the tests run on the server.",
        "Skip the tests this time.",
        "You can leave the test run to me.",
        "Just the edit please, without running tests.",
    ),
    "confirm": (
        "{neighbour} should still pass, confirm that first.",
        "First check that {neighbour} passes.",
        "Before that, run {neighbour}, which should be green.",
        "Start with {neighbour}; that one works.",
        "Begin by running {neighbour}, it is not affected.",
        "To begin with make sure {neighbour} is fine.",
    ),
}

EDITING: tuple[str, ...] = (
    "Line {line} has `{old}`, it should be `{new}`.",
    "`{old}` is wrong here.",
    "On line {line}, `{new}` is meant.",
    "The mistake is on line {line}.",
    "Perhaps it is line {line}.",
    "Line {line} looks odd.",
    "`{old}` may be the cause.",
    "Try `{new}`.",
)
"""Said before a right and before a wrong edit: who is wrong does not know it, and the words must not tell it."""

THOUGHTS: Mapping[str, tuple[str, ...]] = {
    "run": ("See how it fails.", "The failure comes first.", "Only the test is known so far.", "Reproduce it first."),
    "confirm": ("The working test comes first.", "Check the one that should pass.", "Start with the healthy test."),
    "run_failing": ("Now the failing one.", "That works; now the other test.", "Now reproduce the failure."),
    "read_location": (
        "It fails at {place}.",
        "The error is raised at {place}.",
        "{place} is the place that failed.",
        "The trace ends at {place}.",
    ),
    "read_hit": ("It is defined at {place}.", "The definition is at {place}.", "`{name}` is at {place}."),
    "read_both": ("There are two definitions.", "Two places match, look at both.", "One of two candidates."),
    "read_named": ("The file is given: {file}.", "`{name}` is in {file}.", "The function is known already."),
    "read_cursor": ("The cursor is at {place}.", "The place is open at {place}.", "Look around line {line}."),
    "read_test": ("What does the test expect?", "The test itself comes first.", "See what is checked."),
    "read_caller": ("`{caller}` is the way in.", "Begin where the call is made.", "`{caller}` leads to it."),
    "read_on": ("Nothing wrong so far.", "The function goes on further down.", "This is only its beginning."),
    "search": (
        "The test calls `{name}`.",
        "`{name}` is what is being tested.",
        "`{name}` has to be found.",
        "Where `{name}` is defined is not known yet.",
    ),
    "search_callee": ("It calls `{name}`.", "The helper is `{name}`.", "`{name}` does the work here."),
    "edit": EDITING,
    "insert": (
        "A line is missing after line {line}.",
        "Something is left out at line {line}.",
        "Line {line} lacks a step.",
    ),
    "implement": (
        "`{name}` has no body.",
        "The body of `{name}` is missing.",
        "Nothing is written here.",
    ),
    "exact": ("The change is given.", "Line {line} is named already.", "The instruction says what to write."),
    "undo": ("Take the attempt back first.", "The old text comes back first.", "Restore line {line}."),
    "correct": ("Still failing: line {line} needs `{new}`.", "That was the wrong text.", "`{old}` was not it either."),
    "revert": (
        "That was not the cause, put it back.",
        "It did not help, restore line {line}.",
        "Wrong place, undo it.",
    ),
    "after_revert": ("The other suspect is line {line}.", "Line {line} is left.", "So it must be line {line}."),
    "mistake": EDITING,
    "test_edit": ("The change is in.", "Edited; see whether it holds.", "Line {line} is changed.", "Does it pass now?"),
    "run_undone": ("Back to the state before.", "The attempt is out.", "See the old failure again."),
    "recheck": ("Look at the change once more.", "Read it back first.", "Check the edited lines."),
    "neighbour": ("It passes; the other test too?", "Fixed; check the neighbour.", "One more test was asked for."),
    "whole": ("It passes; now the whole file.", "Fixed; the rest of the file too.", "All of the file was asked for."),
}

EXPLANATIONS: Mapping[str, tuple[str, ...]] = {
    "replace": (
        "`{old}` on line {line} of {file} was wrong; it is `{new}` now.",
        "{file}:{line} had `{old}` instead of `{new}`.",
        "In `{name}` ({file}:{line}) I replaced `{old}` by `{new}`.",
    ),
    "insert": (
        "`{name}` lacked `{gone}` after line {line} of {file}; I put it back.",
        "{file}:{line} was followed by a gap: `{gone}` is there again.",
        "A step was missing in `{name}` ({file}:{line}): `{gone}`.",
    ),
    "implement": (
        "`{name}` in {file} had no body; I wrote it (line {line}).",
        "The body of `{name}` ({file}:{line}) was missing and is implemented now.",
        "I implemented `{name}` at {file}:{line}.",
    ),
}
VERIFIED = ("{test} passes now.", "With that {test} passes.", "{test} is green.")
NOT_RUN = ("I have not run the tests, as you asked.", "The tests were not run.", "Nothing was run.")


def say(rng: random.Random, templates: tuple[str, ...], facts: Mapping[str, object]) -> str:
    """Return one of ``templates`` filled with ``facts``."""
    return rng.choice(templates).format_map(facts)


def instruction(
    rng: random.Random, opening: str, intent: str, before: list[str], after: list[str], facts: Mapping[str, object]
) -> str:
    """Return what the user asks: wishes that come first, the request with its symptom, wishes that come last."""
    symptom = say(rng, SYMPTOMS[intent], facts)
    if opening in ("named", "cursor", "where") and intent == "implement_function" and rng.random() < 0.5:
        symptom = f"`{facts['name']}` has to be implemented, {symptom}" if opening != "cursor" else symptom
    filled = {**facts, "s": symptom, "S": symptom[:1].upper() + symptom[1:] if "::" not in symptom[:80] else symptom}
    parts = [say(rng, WISHES[wish], facts) for wish in before]
    parts.append(say(rng, INSTRUCTIONS[opening], filled))
    parts += [say(rng, WISHES[wish], facts) for wish in after]
    return " ".join(parts)
