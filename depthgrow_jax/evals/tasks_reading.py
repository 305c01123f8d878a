r"""Reading: a passage, a question, an answer. What a model reads before the answer (`\n`: a new line):

    boolq                      Passage: {passage}\nQuestion: {question}?\nAnswer:              no or yes
    drop                       Passage: {passage}\nQuestion: {question}\nAnswer:
    quac                       Title, background and section, then the dialogue so far, ending with
                               Question: {question}\nAnswer:       "CANNOTANSWER" where the text does not tell
    natural_questions_open     Context: {passage}\n\nQuestion: {question}\nAnswer:

No examples, as in Kapl et al. 2025: contexts are long. F1 is that of each task's own paper.
"""

from depthgrow_jax.evals.answers import drop_text, squad_text
from depthgrow_jax.evals.readers import choices, drop, questions
from depthgrow_jax.evals.task import Task
from depthgrow_jax.evals.tasks_language import ANSWER, foundry

READING = (
    foundry("boolq", choices(ANSWER), "CC-BY-SA-3.0 (r)"),
    Task(
        "drop",
        drop(),
        "drop/drop_v0_dev.jsonl.gz",
        "https://openaipublic.blob.core.windows.net/simple-evals/drop_v0_dev.jsonl.gz",
        "CC-BY-SA-4.0 (r)",
        metric="drop_f1",
        normalise=drop_text,
        stops=("\n",),
        max_tokens=32,
    ),
    foundry(
        "quac",
        questions("{context}\nAnswer:"),
        "CC-BY-SA-4.0 (r)",
        metric="f1",
        normalise=squad_text,
        stops=("\n",),
        max_tokens=64,
    ),
    foundry(
        "natural_questions_open",
        questions(),
        "CC-BY-SA-3.0 (r)",
        file="natural_questions_openbook_short",
        metric="f1",
        normalise=squad_text,
        stops=("\n",),
        max_tokens=32,
    ),
)
