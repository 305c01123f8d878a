"""Prompts read and tokens made per second, beside `transformers`.

    python benchmarks/decoding.py [--rounds 5] [--new 32]

A Llama of 30 layers, width 576, 9 query and 3 key/value heads, MLP 1536, vocabulary 49152, tied embeddings
(the shape of SmolLM2-135M, random weights), float32, all cores; prompts of 128 tokens, batches of 1 and 8,
greedy. Contenders:

    depthgrow      `model.generate`
    transformers   `generate` with its default (dynamic) cache, sdpa attention

Each contender is a process of its own; the parent lets them work in turn, so that a drift of the machine hits
both. Printed: medians over rounds; `ratio` is the median of the ratio within a round. Prefill is the time to
the first token; decoding that of the others. The first call (compilation) is left out and printed apart.

Needs requirements-dev.txt.
"""

import argparse
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from contender import Contender, serve

from depthgrow_jax.allocator import keep_freed_memory

LENGTH = 128
NAMES = ("depthgrow", "transformers")


def prompts(batch: int):
    """`[batch, LENGTH]` random ids."""
    import numpy as np

    return np.random.default_rng(0).integers(0, 49152, (batch, LENGTH))


def jax_generator(batch: int):
    """A function: new tokens -> nothing, after making them."""
    import jax

    from depthgrow_jax.model import generate, init, preset, unroll

    depth, cfg = preset("smollm_135m", rope_theta=100000.0)
    params = init(cfg, jax.random.key(0), depth)
    ids = prompts(batch).tolist()
    unrolled = unroll(cfg, params)

    def run(new: int) -> None:
        made = generate(cfg, params, ids, max_tokens=new, unrolled=unrolled)
        assert all(len(row.ids) == new for row in made)

    return run


def torch_generator(batch: int):
    """The same with `transformers`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.from_numpy(prompts(batch)).long()
    mask = torch.ones_like(ids)

    @torch.no_grad()
    def run(new: int) -> None:
        made = model.generate(  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
            ids,
            attention_mask=mask,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        assert made.shape == (batch, LENGTH + new)

    return run


def worker(name: str, batch: int, new: int) -> None:
    """Answers every call with the seconds to the first token, and of the others."""
    if name == "transformers":
        run = torch_generator(batch)
    else:
        keep_freed_memory()
        run = jax_generator(batch)

    def work() -> tuple[float, float]:
        marks = [time.perf_counter()]
        for count in (1, new):
            run(count)
            marks.append(time.perf_counter())
        first = marks[1] - marks[0]
        return first, marks[2] - marks[1] - first

    serve(work)


def measure(batch: int, rounds: int, new: int) -> None:
    """Lets the contenders work in turn and prints their rows."""
    options = ("--batch", str(batch), "--new", str(new))
    contenders = {name: Contender(__file__, "--worker", name, *options) for name in NAMES}
    begun = {name: sum(contender.call()) for name, contender in contenders.items()}
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    for number in range(rounds):
        for name in NAMES if number % 2 == 0 else reversed(NAMES):
            first, others = contenders[name].call()
            rates[name].append((batch * LENGTH / first, batch * (new - 1) / others))
    for contender in contenders.values():
        contender.close()
    for name in NAMES:
        prefill, decoding = zip(*rates[name], strict=True)
        pairs = list(zip(rates[name], rates["transformers"], strict=True))
        ratios = [statistics.median(a[i] / b[i] for a, b in pairs) for i in range(2)]
        spread = f"{min(decoding):,.1f}-{max(decoding):,.1f}"
        print(
            f"| {batch} | {name} | {statistics.median(prefill):,.0f} | {ratios[0]:.2f} | "
            f"{statistics.median(decoding):,.1f} ({spread}) | {ratios[1]:.2f} | "
            f"{begun[name]:.1f} |",
            flush=True,
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--batch", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments.worker, arguments.batch, arguments.new)
    print(f"{os.cpu_count()} cores, {arguments.rounds} rounds, {arguments.new} new tokens")
    print("| batch | contender | prefill tokens/s | ratio | decoding tokens/s | ratio | first call s |")
    print("|---|---|---|---|---|---|---|")
    for batch in (1, 8):
        measure(batch, arguments.rounds, arguments.new)
    return None


if __name__ == "__main__":
    main()
