r"""Language modelling, common sense and knowledge. What a model reads before the answer (`\n`: a new line):

    lambada           the passage without its last word (Paperno et al. 2016, in OpenAI's form)
    openbook_qa       {query}, a question or the beginning of a sentence
    copa              {sentence}, because   or   {sentence}, therefore
    arc_*, piqa       Question: {question}\nAnswer:          the answer is the text of a choice
    commonsense_qa    Question: {question}\nChoices:\nA. {text}\n...\nAnswer:        a letter
    winogrande        the sentence up to the blank, filled in; scored is what follows it
    strategy_qa       Q: {question}\nA:                      Yes or No
    qa_wikidata       the beginning of a sentence, such as "The capital of France is"
    triviaqa, natural_questions_closed      Question: {question}\nAnswer:

No examples, as in Kapl et al. 2025, but for qa_wikidata, whose sentences do not tell what ends them.
Licences of all tasks: (r) means recalled, not read beside the file.
"""

from depthgrow_jax.evals.answers import squad_text, trivia_text
from depthgrow_jax.evals.readers import Read, choices, completions, questions, substitutions
from depthgrow_jax.evals.task import Task

FOUNDRY = "https://github.com/mosaicml/llm-foundry: {}, below scripts/eval/local_data, or in its history"
ANSWER = "{query}\nAnswer:"


def foundry(name: str, read: Read, licence: str, *, file: str = "", **fields) -> Task:
    """A task on a file of LLM Foundry's evaluation data, `foundry/NAME.jsonl` unless `file` is its name."""
    file = f"{file or name}.jsonl"
    return Task(name, read, f"foundry/{file}", FOUNDRY.format(file), licence, **fields)


LANGUAGE = (
    foundry("lambada", completions(), "MIT (r)", file="lambada_openai", metric="last_word"),
    foundry("openbook_qa", choices(), "Apache-2.0 (r)"),
    foundry("arc_easy", choices(ANSWER), "CC-BY-SA-4.0 (r)"),
    foundry("arc_challenge", choices(ANSWER), "CC-BY-SA-4.0 (r)"),
    foundry("piqa", choices(ANSWER), "AFL-3.0 (r)"),
    foundry("copa", choices(), "BSD-2-Clause (r)"),
    foundry("winogrande", substitutions(), "CC-BY (r)"),
    foundry("commonsense_qa", choices(), "MIT (r)"),
    foundry("bigbench_strategy_qa", choices(), "Apache-2.0 (r)"),
    foundry("bigbench_qa_wikidata", completions(), "Apache-2.0 (r)", shots=3, metric="last_word"),
    foundry(
        "triviaqa",
        questions(),
        "Apache-2.0 (r)",
        file="triviaqa_sm_sub",
        metric="f1",
        normalise=trivia_text,
        stops=("\n",),
        max_tokens=32,
    ),
    foundry(
        "natural_questions_closed",
        questions(),
        "CC-BY-SA-3.0 (r)",
        metric="f1",
        normalise=squad_text,
        stops=("\n",),
        max_tokens=32,
    ),
)
