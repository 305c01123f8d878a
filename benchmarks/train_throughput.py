"""Training throughput beside PyTorch: one Llama-shaped model, here and in `transformers`, in one run.

    python benchmarks/train_throughput.py [--rounds 5] [--steps 4]

8 layers, width 256, 4 heads, MLP 768, vocabulary 4096, tied embeddings, sequence 256, batch 8, AdamW with
clipping at 1.0, float32, all cores. Each contender is a process of its own; the parent lets them work in
turn, one at a time, so that a drift of the machine hits all of them. A round of a contender times `--steps`
steps; printed are medians over rounds, and the median of the ratio to PyTorch eager within each round.

The grown variant is the LIDAS schedule 2 -> 4 -> 6 -> 8 (PROP-1): its throughput is that of the whole run,
put together from the measured step time of every depth.

`launch.py` makes glibc keep freed memory (`depthgrow_jax/allocator.py`); both frameworks are measured with
and without.

Needs requirements-dev.txt.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from depthgrow_jax.allocator import keep_freed_memory

SHAPE: dict[str, Any] = {"width": 256, "heads": 4, "mlp_dim": 768, "vocab_size": 4096}
DEPTHS = (2, 4, 6, 8)
BATCH, LENGTH = 8, 256
CONTENDERS = {
    # name: (framework, unrolled or compiled, the allocator settings of launch.py)
    "depthgrow": ("jax", False, True),
    "depthgrow unrolled": ("jax", True, True),
    "depthgrow, default malloc": ("jax", False, False),
    "torch eager": ("torch", False, False),
    "torch eager, same malloc": ("torch", False, True),
    "torch.compile": ("torch", True, False),
}
BASELINE = "torch eager"


def flops_per_step(depth: int) -> int:
    """Matmul FLOPs of one optimizer step, as docs/method.md counts them."""
    from depthgrow_jax.growth.cost import flops_per_token
    from depthgrow_jax.model import ModelConfig

    return BATCH * LENGTH * flops_per_token(ModelConfig(**SHAPE), depth, LENGTH)


def tokens(seed: int = 0):
    """`[BATCH, LENGTH + 1]` ids; random ones cost as much as text."""
    import numpy as np

    return np.random.default_rng(seed).integers(0, SHAPE["vocab_size"], (BATCH, LENGTH + 1), dtype=np.int32)


def depthgrow_steps(unrolled: bool):
    """depth -> function of a number of steps, and the rate of a plain matmul, FLOP/s."""
    import jax
    import jax.numpy as jnp

    from depthgrow_jax.growth import GrowthConfig
    from depthgrow_jax.model import ModelConfig
    from depthgrow_jax.train.config import OptimizerConfig, TrainConfig
    from depthgrow_jax.train.objective import SpecialTokens
    from depthgrow_jax.train.optimizer import make_optimizer
    from depthgrow_jax.train.state import create
    from depthgrow_jax.train.step import StepConfig, make_train_step

    optimizer = OptimizerConfig(schedule="constant")
    train = TrainConfig(batch_size=BATCH, sequence_length=LENGTH)
    special = SpecialTokens(SHAPE["vocab_size"], 0, 1)
    tx = make_optimizer(optimizer)
    batch = jnp.asarray(tokens())

    def at_depth(depth):
        model = ModelConfig(**SHAPE, scan_unroll=depth if unrolled else 1)
        config = StepConfig(model, GrowthConfig(), train, optimizer, special, (), 0)
        step = jax.jit(make_train_step(config, tx), donate_argnums=0)
        holder = [create(model, tx, depth, 0, ema=False)]

        def run(count):
            for _ in range(count):
                holder[0], metrics = step(holder[0], batch)
            return float(metrics["loss"])

        return run

    matrix = jnp.ones((2048, 2048))
    product = jax.jit(lambda a: a @ a)
    return at_depth, lambda: product(matrix).block_until_ready()


def torch_steps(compiled: bool):
    """As `depthgrow_steps`, for `transformers.LlamaForCausalLM`."""
    import torch
    from torch.nn import functional
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    data = torch.from_numpy(tokens()).long()

    def at_depth(depth):
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=SHAPE["width"],
            intermediate_size=SHAPE["mlp_dim"],
            num_hidden_layers=depth,
            num_attention_heads=SHAPE["heads"],
            num_key_value_heads=SHAPE["heads"],
            vocab_size=SHAPE["vocab_size"],
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
            use_cache=False,
            attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
        )
        model = LlamaForCausalLM(config)
        forward = torch.compile(model) if compiled else model
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)

        def run(count):
            for _ in range(count):
                logits = forward(input_ids=data[:, :-1]).logits
                loss = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), data[:, 1:].reshape(-1))
                adamw.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                adamw.step()
            return loss.item()

        return run

    matrix = torch.ones((2048, 2048))
    return at_depth, lambda: matrix @ matrix


def worker(name: str) -> None:
    """Answers `depth steps` lines on stdin with seconds on stdout; `matmul` with FLOP/s."""
    framework, option, keeps_memory = CONTENDERS[name]
    if keeps_memory:
        keep_freed_memory()
    at_depth, product = torch_steps(option) if framework == "torch" else depthgrow_steps(option)
    runs = {}
    for line in sys.stdin:
        if line.strip() == "matmul":
            product()
            start = time.perf_counter()
            for _ in range(10):
                product()
            print(json.dumps(10 * 2 * 2048**3 / (time.perf_counter() - start)), flush=True)
            continue
        depth, count = map(int, line.split())
        if depth not in runs:
            runs[depth] = at_depth(depth)
            runs[depth](2)  # compiles
        start = time.perf_counter()
        runs[depth](count)
        print(json.dumps(time.perf_counter() - start), flush=True)


class Contender:
    """A worker process."""

    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> float:
        """The worker's answer to a line."""
        assert self.process.stdin and self.process.stdout
        print(line, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """Ends the worker."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def grown_seconds(seconds: Mapping[int, float]) -> float:
    """Mean seconds a step of the LIDAS run, PROP-1: stage i of k takes i / (1 + ... + k) of the steps."""
    weights = range(1, len(DEPTHS) + 1)
    return sum(w * seconds[depth] for w, depth in zip(weights, DEPTHS, strict=True)) / sum(weights)


def main() -> None:
    """Runs the rounds and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--contenders", default=";".join(CONTENDERS), help="some of them, between semicolons")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments.worker)

    names = arguments.contenders.split(";")
    contenders = {name: Contender(name) for name in names}
    times = {name: {depth: [] for depth in DEPTHS} for name in names}
    peaks = {name: [] for name in names}
    for name in names:
        for depth in DEPTHS:
            contenders[name].ask(f"{depth} 1")
    for number in range(arguments.rounds):
        for depth in reversed(DEPTHS):
            for name in names if number % 2 == 0 else reversed(names):
                times[name][depth].append(
                    contenders[name].ask(f"{depth} {arguments.steps}") / arguments.steps
                )
        for name in names:
            peaks[name].append(contenders[name].ask("matmul"))
    for contender in contenders.values():
        contender.close()

    batch_tokens = BATCH * LENGTH
    print(f"\n{os.cpu_count()} cores, {arguments.rounds} rounds of {arguments.steps} steps")
    print("| run | contender | tokens/s, median (min-max) | to torch eager | GFLOP/s | of a plain matmul |")
    print("|---|---|---|---|---|---|")
    for title in ("static, 8 layers", "grown, 2-4-6-8 layers"):
        static = title.startswith("static")
        per_depth = {depth: flops_per_step(depth) for depth in DEPTHS}
        flops = per_depth[8] if static else grown_seconds(per_depth)
        per_step = {name: times[name][8] if static else _grown_rounds(times[name]) for name in names}
        for name in names:
            rates = [batch_tokens / s for s in per_step[name]]
            ratio = "-"
            if BASELINE in names:
                pairs = zip(per_step[BASELINE], per_step[name], strict=True)
                ratio = f"{statistics.median(base / own for base, own in pairs):.2f}"
            speed = flops / statistics.median(per_step[name])
            share = speed / statistics.median(peaks[name])
            print(
                f"| {title} | {name} | {statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f}) "
                f"| {ratio} | {speed / 1e9:.1f} | {share:.0%} |"
            )
    flops = {depth: flops_per_step(depth) for depth in DEPTHS}
    print(
        f"\nFLOPs saved by growing: {1 - grown_seconds(flops) / flops[8]:.1%}; step seconds saved, of that:"
    )
    for name in names:
        medians = {depth: statistics.median(times[name][depth]) for depth in DEPTHS}
        saved = 1 - grown_seconds(medians) / medians[8]
        print(f"- {name}: {saved:.1%} ({saved / (1 - grown_seconds(flops) / flops[8]):.0%})")
    return None


def _grown_rounds(times: dict[int, list[float]]) -> list[float]:
    """Mean seconds a step of the grown run, for each round."""
    rounds = zip(*(times[depth] for depth in DEPTHS), strict=True)
    return [grown_seconds(dict(zip(DEPTHS, seconds, strict=True))) for seconds in rounds]


if __name__ == "__main__":
    main()
