"""Multiple-choice items per second, beside the `hf` model of lm-evaluation-harness on the same checkpoint.

    python benchmarks/eval_throughput.py [--items 500] [--rounds 3]

A Llama of 8 layers, width 256, 4 heads, MLP 768, random weights, with a byte-level BPE of 4096 ids, exported
once; float32, all cores. Items:

    assign_code_0    five choices of one token each, without examples and with five; the harness, too, reads
                     a context once for such choices
    copy_random      ten choices of one to three tokens

Contenders:

    depthgrow    `evals.scoring.log_likelihoods`, batches of 2,048 tokens
    lm-eval hf   `HFLM.loglikelihood` with batches of 1, 8 and 32 requests, the best of which is compared

Both get the same pairs of texts and tokenize them; each is a process of its own, and they work in turn.
Printed: medians over rounds, the median of the ratio within a round, and the largest difference of a
log-likelihood.

Needs requirements-dev.txt.
"""

import argparse
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from contender import Contender, serve

BATCHES = (1, 8, 32)
# (task, examples)
CASES = (("assign_code_0", 0), ("copy_random", 0), ("assign_code_0", 5))
WIDTH, DEPTH, VOCABULARY = 256, 8, 4096


def texts(task: str, items: int, shots: int) -> list[tuple[str, tuple[str, ...]]]:
    """(prompt, choices) of every item."""
    from depthgrow_jax.evals.primitives import generate
    from depthgrow_jax.evals.prompting import few_shot

    asked = generate(task, items, 0)
    before = few_shot(asked, generate(task, 100, 0, "train"), shots, "\n\n", 0)
    return [(b + item.prompt, item.choices) for b, item in zip(before, asked, strict=True)]


def make_checkpoint(place: pathlib.Path) -> None:
    """Exports the network, with a tokenizer trained on the items."""
    import jax

    from depthgrow_jax.data.tokenizer import train_bpe
    from depthgrow_jax.interop import Vocabulary
    from depthgrow_jax.interop.export import export
    from depthgrow_jax.model import ModelConfig, init, layer_program

    cfg = ModelConfig(vocab_size=VOCABULARY, width=WIDTH, heads=4, mlp_dim=3 * WIDTH)
    items = [item for task in {task: None for task, _ in CASES} for item in texts(task, 200, 0)]
    backend = train_bpe([a + "".join(b) for a, b in items], VOCABULARY, ("<|endoftext|>",))
    vocabulary = Vocabulary(backend.to_str(), "<|endoftext|>", (), (0,))
    params = init(cfg, jax.random.key(0), DEPTH)
    program = layer_program(cfg, DEPTH)
    export(cfg, params, program, place, context=2048, vocabulary=vocabulary, lineage={})


def depthgrow(place: str, asked: list[tuple[str, tuple[str, ...]]]):
    """A function: nothing -> log-likelihoods."""
    from depthgrow_jax.corpora import tokenizer_of
    from depthgrow_jax.evals.prompting import Encoder
    from depthgrow_jax.evals.scoring import log_likelihoods
    from depthgrow_jax.subjects import load_network

    loaded = load_network(f"hf:{place}", flag="--model")
    tokenizer = tokenizer_of(loaded, lambda line: None)
    encoder = Encoder(tokenizer, (), tokenizer.separator_id, loaded.context)

    def run() -> list[float]:
        requests = encoder.requests([(prompt, choice) for prompt, choices in asked for choice in choices])
        return [found.log_prob for found in log_likelihoods(loaded.subject, list(requests))]

    return run


def harness(place: str, asked: list[tuple[str, tuple[str, ...]]], batch: int):
    """The same by lm-evaluation-harness."""
    import torch
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    torch.set_num_threads(os.cpu_count() or 1)
    make: Any = HFLM
    model = make(pretrained=place, device="cpu", dtype="float32", batch_size=batch)
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=(prompt, choice), idx=i)
        for prompt, choices in asked
        for i, choice in enumerate(choices)
    ]

    def run() -> list[float]:
        return [found[0] for found in model.loglikelihood(requests, disable_tqdm=True)]

    return run


def worker(name: str, place: str, task: str, items: int, shots: int) -> None:
    """Answers every call with its seconds and the log-likelihoods."""
    asked = texts(task, items, shots)
    if name == "depthgrow":
        run = depthgrow(place, asked)
    else:
        run = harness(place, asked, int(name.rpartition(" ")[2]))

    def work() -> tuple[float, list[float]]:
        start = time.perf_counter()
        found = run()
        return time.perf_counter() - start, found

    serve(work)


def measure(place: str, task: str, items: int, shots: int, rounds: int) -> None:
    """Lets the contenders work in turn and prints their rows."""
    names = ("depthgrow", *(f"lm-eval hf {batch}" for batch in BATCHES))
    options = ("--place", place, "--task", task, "--items", str(items), "--shots", str(shots))
    contenders = {name: Contender(__file__, "--worker", name, *options) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    found: dict[str, list[float]] = {}
    first = contenders["depthgrow"].call()[0]
    for _ in range(rounds):
        for name in names:
            took, found[name] = contenders[name].call()
            seconds[name].append(took)
    for contender in contenders.values():
        contender.close()
    best = min(names[1:], key=lambda name: statistics.median(seconds[name]))
    for name in names:
        ratio = statistics.median(a / b for a, b in zip(seconds[best], seconds[name], strict=True))
        gap = max(abs(a - b) for a, b in zip(found[name], found[best], strict=True))
        median = statistics.median(seconds[name])
        print(f"| {task}, {shots} | {name} | {items / median:.1f} | {ratio:.2f} | {gap:.1e} |", flush=True)
    print(f"first call of depthgrow, compilation included: {first:.1f} s")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shots", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments.worker, arguments.place, arguments.task, arguments.items, arguments.shots)
    print(f"{os.cpu_count()} cores, {arguments.items} items, {arguments.rounds} rounds")
    print("| items, shots | contender | items/s | to the best of lm-eval | largest difference, nats |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        make_checkpoint(pathlib.Path(place) / "model")
        for task, shots in CASES:
            measure(f"{place}/model", task, arguments.items, shots, arguments.rounds)
    return None


if __name__ == "__main__":
    main()
