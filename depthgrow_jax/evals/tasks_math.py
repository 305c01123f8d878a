r"""Arithmetic and word problems, five examples. What a model reads before the answer (`\n`: a new line):

    gsm8k, svamp, svamp_300, aqua     Question: {question}\nAnswer:
    math_qa                           Question: {question}\nA. {text}\n...\nAnswer:       a letter
    simple_arithmetic_nospaces        25-759=
    simple_arithmetic_withspaces      25 - 759 =

Answers of the examples: GSM8K's solution with its calculator annotations and `#### 72` (from the training
set, as in lm-evaluation-harness); the number alone (svamp); an equation and "The final answer is 587"
(svamp_300, the test split of another release); a solution and "The final answer is ..." (aqua, without its
options). `answers.number` says how numbers are found. Some options of math_qa are empty in its file.
"""

from depthgrow_jax.evals.answers import final_answer, number, same_number
from depthgrow_jax.evals.readers import choices, completions, gsm8k, solved, svamp
from depthgrow_jax.evals.task import Task
from depthgrow_jax.evals.tasks_language import foundry

_NEXT = ("Question:",)
_SUM = {"shots": 5, "separator": "\n", "metric": "last_word"}

MATH = (
    Task(
        "gsm8k",
        gsm8k(),
        "gsm8k/test.jsonl",
        "https://github.com/openai/grade-school-math: grade_school_math/data/test.jsonl and train.jsonl",
        "MIT",
        shots=5,
        shots_read=gsm8k(),
        shots_path="gsm8k/train.jsonl",
        metric="exact",
        extract=number,
        normalise=same_number,
        stops=_NEXT,
        max_tokens=256,
    ),
    Task(
        "svamp",
        svamp(),
        "mwp/SVAMP.json",
        "https://github.com/arkilpatel/SVAMP: SVAMP.json",
        "MIT",
        shots=5,
        metric="exact",
        extract=number,
        normalise=same_number,
        stops=("\n\n", *_NEXT),
    ),
    foundry(
        "svamp_300",
        solved(),
        "MIT (r)",
        file="svamp",
        shots=5,
        metric="exact",
        extract=number,
        normalise=same_number,
        stops=("\n\n", *_NEXT),
    ),
    foundry(
        "aqua",
        solved(),
        "Apache-2.0 (r)",
        shots=5,
        metric="exact",
        extract=final_answer,
        normalise=same_number,
        stops=_NEXT,
        max_tokens=256,
    ),
    foundry("math_qa", choices(), "Apache-2.0 (r)", shots=5),
    foundry("simple_arithmetic_nospaces", completions(""), "Apache-2.0 (r)", **_SUM),
    foundry("simple_arithmetic_withspaces", completions(""), "Apache-2.0 (r)", **_SUM),
)
