"""Benchmark files in their upstream formats, read into items.

Each function takes what a task fixes and gives a reader, `(path, seed) -> items`. `prompt` is a format string
over the fields of a record, without white space at their ends. An answer follows its prompt after one space.
Whatever is wrong with a record is a `UserError` that names the file, the record and what is legal.
"""

import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from depthgrow_jax.errors import UserError
from depthgrow_jax.evals.answers import canonical_number
from depthgrow_jax.evals.items import Choice, Completion, Item, Question, Substitution
from depthgrow_jax.evals.records import Record, json_lines, json_list, text_lines

Read = Callable[[pathlib.Path | None, int], list[Item]]

FINAL = "The final answer is"
_OPTION = re.compile(r"([A-Z])\)\s*(.*\S)\s*", re.DOTALL)
_FORMULA = re.compile(r"[a-z()~&|>]+")


def completions(delimiter: str = " ") -> Read:
    """Lines `context, continuation`; `delimiter` stands between them and belongs to the target."""

    def item(record: Record) -> Completion:
        return Completion(record.text("context"), delimiter + record.text("continuation", strip=False))

    return _lines(item)


def choices(prompt: str = "{query}") -> Read:
    """Lines `query, choices, gold`."""

    def item(record: Record) -> Choice:
        options = record.texts("choices", least=2)
        gold = record.index("gold", len(options))
        return Choice(prompt.format(query=record.text("query")), _after_space(options), gold)

    return _lines(item)


def substitutions() -> Read:
    """Lines `context_options, continuation, gold`: Winogrande, the blank filled in either way."""

    def item(record: Record) -> Substitution:
        options = record.texts("context_options", least=2)
        gold = record.index("gold", len(options))
        return Substitution(options, " " + record.text("continuation"), gold)

    return _lines(item)


def questions(prompt: str = "{context}") -> Read:
    """Lines `context, answer, aliases`: any alias is as right as the answer."""

    def item(record: Record) -> Question:
        answers = (record.text("answer"), *record.texts("aliases"))
        return _question(prompt.format(context=record.text("context")), tuple(dict.fromkeys(answers)))

    return _lines(item)


def solved(prompt: str = "Question: {context}\nAnswer:") -> Read:
    """Lines `context, chain_of_thought, answer`. An example shows the thought, then "The final answer is"."""

    def item(record: Record) -> Question:
        answer = record.text("answer")
        solution = f"{record.text('chain_of_thought')}\n{FINAL} {answer}"
        return _question(prompt.format(context=record.text("context")), (answer,), solution)

    return _lines(item)


def gsm8k(prompt: str = "Question: {question}\nAnswer:") -> Read:
    """Lines `question, answer`: a solution that ends with `#### number`. An example shows all of it."""

    def item(record: Record) -> Question:
        solution = record.text("answer")
        _, mark, answer = solution.rpartition("####")
        number = canonical_number(answer)
        if not mark or number is None:
            raise record.error("answer", answer or solution, "must end with '#### ' and a number")
        return _question(prompt.format(question=record.text("question")), (number,), solution)

    return _lines(item)


def drop(prompt: str = "{context}") -> Read:
    """Lines `context, ref_text`: the answers of all annotators, `|` between them.

    Spans of one answer are joined by "and" in this file, and are scored as one span.
    """

    def item(record: Record) -> Question:
        answers = [answer.strip() for answer in record.text("ref_text").split("|")]
        if not all(answers):
            raise record.error("ref_text", record.fields["ref_text"], "must hold no empty answer")
        return _question(prompt.format(context=record.text("context")), tuple(dict.fromkeys(answers)))

    return _lines(item)


def svamp(prompt: str = "Question: {body} {question}\nAnswer:") -> Read:
    """A list of `Body, Question, Answer, Type`. Bodies end without punctuation where the question goes on."""

    def item(record: Record) -> Question:
        number = canonical_number(str(record.fields.get("Answer")))
        if number is None:
            raise record.error("Answer", record.fields.get("Answer"), "must be a number")
        text = prompt.format(body=record.text("Body"), question=record.text("Question"))
        # Some records of the published file are misspelt.
        kind = record.text("Type").replace("Divison", "Division")
        return _question(text, (number,), group=kind)

    return _list(item)


def options(prompt: str = "{context}\n{question}\nAnswer:") -> Read:
    """A list of `context, question, options, answer`: options "A) ...", "B) ...", the answer a letter.

    Choices are the texts of the options, which the prompt does not list: small models cannot use letters.
    The number of options is the group where it differs within a file.
    """

    def item(record: Record) -> Choice:
        listed = record.texts("options", least=2)
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(listed)]
        parts = [_OPTION.fullmatch(option) for option in listed]
        if [part and part[1] for part in parts] != list(letters):
            raise record.error("options", list(listed), "must begin with A), B), ... in this order")
        answer = record.text("answer")
        if answer not in tuple(letters):
            raise record.error("answer", answer, f"must be one of {', '.join(letters)}")
        text = prompt.format(context=record.text("context"), question=record.text("question"))
        return Choice(text, _after_space(part[2] for part in parts if part), letters.index(answer))

    def grouped(records: Iterator[Record]) -> list[Choice]:
        items = [item(record) for record in records]
        if len({len(choice.choices) for choice in items}) == 1:
            return items
        return [choice._replace(group=f"{len(choice.choices)} options") for choice in items]

    return _reader(json_list, grouped)


def entailment(prompt: str) -> Read:
    """Lines `A,B,entails,h1,h2,h3`, formulas without spaces, `>` for implication (Evans et al. 2018).

    `prompt` takes `{a}` and `{b}`; the choices are " no" and " yes". h1 to h3, what heuristics say, are not
    read.
    """

    def item(record: Record) -> Choice:
        a, b, entails, *_ = fields = record.fields["line"].split(",")
        if len(fields) != 6 or not _FORMULA.fullmatch(a) or not _FORMULA.fullmatch(b):
            raise record.error("line", record.fields["line"], "must be A,B,entails,h1,h2,h3, formulas first")
        if entails not in ("0", "1"):
            raise record.error("entails", entails, "must be 0 or 1")
        return Choice(prompt.format(a=a, b=b), (" no", " yes"), int(entails))

    return _reader(text_lines, lambda records: [item(record) for record in records])


def _lines(item: Callable[[Record], Item]) -> Read:
    return _reader(json_lines, lambda records: [item(record) for record in records])


def _list(item: Callable[[Record], Item]) -> Read:
    return _reader(json_list, lambda records: [item(record) for record in records])


def _reader(
    records: Callable[[pathlib.Path], Iterator[Record]], items: Callable[[Iterator[Record]], Sequence[Item]]
) -> Read:
    def read(path: pathlib.Path | None, seed: int) -> list[Item]:
        assert path is not None
        found = list(items(records(path)))
        if not found:
            raise UserError(f"{path}: holds no record")
        return found

    return read


def _after_space(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(f" {text}" for text in texts)


def _question(prompt: str, answers: tuple[str, ...], shown: str = "", group: str = "") -> Question:
    """A question whose example ends with `shown`, or with the first answer."""
    return Question(prompt, answers, group, f"{prompt} {shown or answers[0]}")
