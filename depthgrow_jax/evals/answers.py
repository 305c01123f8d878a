"""What a generated text answers, and how well that agrees with the gold answers."""

import collections
import re
import string
from collections.abc import Callable

from depthgrow_jax.evals.items import Question
from depthgrow_jax.evals.task import Task

# A minus is a sign only where nothing stands before it that it could be subtracted from.
_NUMBER = r"(?:(?<![\w.)])\$?[-−])?\$?(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d+|(?=\.\d))(?:\.\d+)?"
_NUMBERS = re.compile(_NUMBER, re.ASCII)
_MARKED = re.compile(rf"####\s*({_NUMBER})", re.ASCII)
_FINAL = re.compile(r"the final answer is:?[ \t]*([^\n]*)", re.IGNORECASE)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_TRIVIA_PUNCTUATION = string.punctuation + "‘’´`"


def number(text: str) -> str | None:
    """The number that a solution ends with, canonical; None without any.

    The first number marked `####`; else the first one after the last "The final answer is", on its line; else
    the last one of the text.
    """
    if marked := _MARKED.search(text):
        return canonical_number(marked[1])
    found = _NUMBERS.findall(_conclusion(text) or "")[:1] or _NUMBERS.findall(text)[-1:]
    return canonical_number(found[0]) if found else None


def final_answer(text: str) -> str | None:
    """What follows the last "The final answer is" on its line; else the last line."""
    final = _conclusion(text)
    return ((text.strip().splitlines() or [""])[-1] if final is None else final).strip() or None


def _conclusion(text: str) -> str | None:
    # The last one: solutions also say it on the way ("the final answer is 15 gallons * 8 pints").
    return (_FINAL.findall(text) or [None])[-1]


def canonical_number(text: str) -> str | None:
    """One spelling of each number: `$1,234.50.` is `1234.5`; None if `text` is not a number."""
    found = _NUMBERS.fullmatch(text.strip().removesuffix("."))
    if not found:
        return None
    digits = re.sub(r"[$,−-]", "", found[0])
    whole, _, part = digits.partition(".")
    plain = (whole.lstrip("0") or "0") + ("." + part.rstrip("0")).removesuffix(".")
    negative = plain != "0" and re.search("[-−]", found[0])
    return f"-{plain}" if negative else plain


def same_number(text: str) -> str:
    """Normal form of short answers to sums: lower case, no `$`, commas and spaces; numbers are canonical."""
    plain = re.sub(r"[$,\s]", "", text.lower()).removesuffix(".")
    return canonical_number(plain) or plain


def squad_text(text: str) -> str:
    """Normal form of SQuAD (Rajpurkar et al. 2016): lower case; no punctuation, then no articles."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def trivia_text(text: str) -> str:
    """Normal form of TriviaQA (Joshi et al. 2017): SQuAD's, but punctuation and quotes become spaces."""
    plain = "".join(" " if c in _TRIVIA_PUNCTUATION else c for c in text.lower())
    return " ".join(_ARTICLES.sub(" ", plain).split())


def drop_text(text: str) -> str:
    """Normal form of DROP (Dua et al. 2019): words, split at hyphens too, lower case, numbers as floats.

    A word that is not a number loses its punctuation, and is tried again: `$1,000` is 1000.0.
    """
    return " ".join(" ".join(_drop_word(word) for word in re.split("[ -]", text.lower())).split())


def _drop_word(word: str) -> str:
    if not _is_float(word):
        word = "".join(c for c in word if c not in string.punctuation)
    return str(float(word)) if _is_float(word) else _ARTICLES.sub(" ", word)


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def token_f1(predicted: str, gold: str) -> float:
    """F1 of the words that two normal forms share, each as often as both have it (SQuAD, QuAC)."""
    found, wanted = collections.Counter(predicted.split()), collections.Counter(gold.split())
    return _f1((found & wanted).total(), found.total(), wanted.total())


def drop_f1(predicted: str, gold: str) -> float:
    """F1 of DROP: sets of words; 0 if `gold` has numbers and shares none; rounded to two places as there."""
    found, wanted = set(predicted.split()), set(gold.split())
    numbers = {word for word in wanted if _is_float(word)}
    if numbers and not numbers & found:
        return 0.0
    return round(_f1(len(found & wanted), len(found), len(wanted)), 2)


def _f1(shared: int, found: int, wanted: int) -> float:
    return 2 * shared / (found + wanted) if shared else 0.0


F1: dict[str, Callable[[str, str], float]] = {"f1": token_f1, "drop_f1": drop_f1}


def grade(task: Task, text: str, question: Question) -> tuple[str | None, dict[str, float]]:
    """The answer in a generated text, and its scores: `exact`, and `task.metric` where that is an F1.

    Each score is the best over the gold answers, 0 where there is no answer. An answer that normalisation
    leaves nothing of (the band "The The") is compared as it is, in lower case.
    """
    answer = task.extract(text)

    def normal(text: str) -> str:
        return task.normalise(text) or text.strip().lower()

    found = normal(answer or "")
    gold = [normal(right) for right in question.answers]
    scores = {"exact": float(bool(found) and found in gold)}
    if task.metric in F1:
        scores[task.metric] = max(F1[task.metric](found, right) for right in gold)
    return answer, scores
