r"""Deduction and symbol manipulation. What a model reads before the answer (`\n`: a new line):

    proofwriter, prontoqa, folio, logical_deduction
        {facts and rules}\n{question}\nAnswer:        the text of an option; the options are not listed
    entailment_*
        {A} entails {B}\nAnswer:                      no or yes; `~` not, `&` and, `|` or, `>` implies
    bigbench_*      as in BIG-bench (Srivastava et al. 2022)

Examples: two where texts are long, five for formulas, and as many as LLM Foundry shows for BIG-bench, from
training or validation files where there are some. ProofWriter is the part of five hops under the open-world
assumption. Paragraphs of LogicalDeduction's training file return, with other questions, in its test file.
"""

from depthgrow_jax.evals.readers import choices, completions, entailment, options
from depthgrow_jax.evals.task import Task
from depthgrow_jax.evals.tasks_language import foundry

_LOGIC_LLM = "https://github.com/teacherpeterpan/Logic-LLM: data/{}/SPLIT.json, saved as {}_SPLIT.json"
_ENTAILMENT = "https://github.com/google-deepmind/logical-entailment-dataset: data/"
_FORMULAS = entailment("{a} entails {b}\nAnswer:")


def _logic_llm(name: str, upstream: str, split: str, licence: str, examples: str = "train") -> Task:
    return Task(
        name,
        options(),
        f"logic/{upstream}_{split}.json",
        _LOGIC_LLM.format(upstream, upstream),
        licence,
        shots=2,
        shots_read=options() if examples else None,
        shots_path=f"logic/{upstream}_{examples}.json" if examples else "",
    )


def _entailment(split: str, upstream: str = "") -> Task:
    file = f"test_{split}.txt"
    source = f"{upstream}, saved as {file}" if upstream else file
    return Task(
        f"entailment_{split}",
        _FORMULAS,
        f"entailment/{file}",
        f"{_ENTAILMENT}{source}, and validate.txt",
        "Apache-2.0",
        shots=5,
        shots_read=_FORMULAS,
        shots_path="entailment/validate.txt",
    )


LOGIC = (
    _logic_llm("proofwriter", "ProofWriter", "test", "CC-BY-4.0 (r)"),
    _logic_llm("prontoqa", "ProntoQA", "dev", "Apache-2.0 (r)", examples=""),
    _logic_llm("logical_deduction", "LogicalDeduction", "dev", "Apache-2.0 (r)"),
    _logic_llm("folio", "FOLIO", "dev", "CC-BY-SA-4.0 (r)"),
    _entailment("easy"),
    _entailment("hard"),
    _entailment("big", upstream="big_20_test_big.txt"),
    _entailment("massive"),
    _entailment("exam"),
    foundry("bigbench_logical_deduction", choices(), "Apache-2.0 (r)", shots=2),
    foundry("bigbench_dyck_languages", completions(), "Apache-2.0 (r)", shots=5, metric="last_word"),
    foundry("bigbench_cs_algorithms", completions(), "Apache-2.0 (r)", shots=10, metric="last_word"),
    foundry("bigbench_operators", completions(), "Apache-2.0 (r)", shots=3, metric="last_word"),
    foundry("bigbench_repeat_copy_logic", completions(), "Apache-2.0 (r)", shots=10, metric="last_word"),
)
