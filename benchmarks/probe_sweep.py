"""What sweeping over layers costs, in forward passes, beside naive loops here and in PyTorch.

    python benchmarks/probe_sweep.py [--rounds 5] [--depths 12,24]

Width 256, 4 heads, MLP 768, vocabulary 4096, tied embeddings, 8 prompts of 256 tokens, float32, all cores.
Contenders:

    forward      one jitted forward pass with its logits: the unit
    skip         every layer skipped in turn (`probes.suffix`): effects on each later layer and on the output
    naive loop   (a) the same numbers from a Python loop of jitted full passes, one compilation
    orders       swaps of neighbouring layers, repeats of each: 2 L - 1 orders (`probes.programs`)
    lens         the logit lens at all points, all its measures
    torch        (b) the same skip sweep on the equal `transformers` model with forward hooks
    torch forward

Each contender is a process of its own; the parent lets them work in turn, so that a drift of the machine hits
all of them. Printed: medians over rounds of the ratio within a round. Peak memory is what the resident set
grew by during the first call (compilation included) and the calls after it.

Needs requirements-dev.txt.
"""

import argparse
import os
import resource
import statistics
import sys
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from contender import Contender, serve

from depthgrow_jax.allocator import keep_freed_memory

SHAPE: dict[str, Any] = {"width": 256, "heads": 4, "mlp_dim": 768, "vocab_size": 4096}
BATCH, LENGTH = 8, 256
CONTENDERS = ("forward", "skip", "naive loop", "orders", "lens", "torch", "torch forward")
CHUNK_BYTES = 4 * 256 * SHAPE["vocab_size"]  # what the command chooses on a CPU


def tokens():
    """`[BATCH, LENGTH + 1]` ids; random ones cost as much as text."""
    import numpy as np

    return np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (BATCH, LENGTH + 1), dtype=np.int32)


def jax_task(name: str, depth: int):
    """A function that does the work once and waits for it."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from depthgrow_jax import model
    from depthgrow_jax.probes import programs
    from depthgrow_jax.probes.config import LensConfig
    from depthgrow_jax.probes.inputs import Subject, windows
    from depthgrow_jax.probes.lens import logit_lens
    from depthgrow_jax.probes.outputs import effects
    from depthgrow_jax.probes.result import over_tokens
    from depthgrow_jax.probes.settings import Settings
    from depthgrow_jax.probes.suffix import Where, clean_run, relative_effect, sweep

    cfg = model.ModelConfig(**SHAPE)
    params = jax.block_until_ready(jax.jit(lambda: model.init(cfg, jax.random.key(0), depth))())
    program = model.layer_program(cfg, depth)
    data = tokens()
    inputs, targets = jnp.asarray(data[:, :-1]), jnp.asarray(data[:, 1:])
    counted = jnp.ones((BATCH, 1, LENGTH), bool)

    if name == "forward":
        forward = jax.jit(lambda p, x: model.apply(cfg, p, x).logits)
        return lambda: forward(params, inputs).block_until_ready()

    if name == "skip":
        where = Where(counted, counted, counted)
        zero = jnp.zeros((depth, BATCH, LENGTH, cfg.width))
        starts, active = np.arange(depth), np.ones(depth, bool)

        def skip():
            clean = clean_run(cfg, params, program, inputs)
            how = {"lanes": 1, "chunk_bytes": CHUNK_BYTES}
            jax.block_until_ready(
                sweep(cfg, params, program, clean, zero, where, targets, starts, active, **how)
            )

        return skip

    if name == "naive loop":
        taps = {"c": lambda tap: tap.attn + tap.mlp}

        @jax.jit
        def ablated(params, gate, clean):
            out = model.apply(cfg, params, inputs, program=program._replace(gate=gate), taps=taps)
            if clean is None:
                return out.hidden, out.taps["c"]
            final, added = clean
            effect = over_tokens(relative_effect(added, out.taps["c"]), counted[None, :, 0])
            outputs = effects(cfg, params, final, out.hidden[None], targets, CHUNK_BYTES)
            return effect, {k: over_tokens(v, counted[None, :, 0]) for k, v in outputs.items()}

        gates = [program.gate.at[s].set(0.0) for s in range(depth)]

        def loop():
            clean = ablated(params, program.gate, None)
            jax.block_until_ready([ablated(params, gate, clean) for gate in gates])

        return loop

    if name == "orders":
        changes = [programs.swap(depth, s, 1) for s in range(depth - 1)]
        changes += [programs.repeat(depth, s, 1) for s in range(depth)]
        kept = jnp.ones((BATCH, LENGTH), bool)

        def orders():
            streams, _ = programs.clean_run(cfg, params, program, inputs, targets, kept, CHUNK_BYTES)
            programs.sweep(cfg, params, program, streams, targets, kept, changes, CHUNK_BYTES)

        return orders

    prompts = windows(data)
    settings = Settings(batch_size=BATCH, chunk_bytes=CHUNK_BYTES)
    return lambda: logit_lens(Subject(cfg, params, program), prompts, settings, LensConfig())


def torch_task(name: str, depth: int):
    """As `jax_task`, for `transformers.LlamaForCausalLM`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
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
    model = LlamaForCausalLM(config).eval()
    data = torch.from_numpy(tokens()).long()
    inputs, targets = data[:, :-1], data[:, 1:]

    @torch.no_grad()
    def forward():
        return model(input_ids=inputs).logits

    def quantiles(values):
        """Mean, median, 95th percentile and maximum over the tokens of each prompt."""
        levels = torch.tensor([0.5, 0.95, 1.0])
        return torch.cat([values.mean(-1)[None], torch.quantile(values, levels, dim=-1)])

    @torch.no_grad()
    def skip():
        added: dict[int, Any] = {}
        skipped: list[int] = []

        def hook(index):
            def replace(module, arguments, output):
                entering = arguments[0]
                leaving = output[0] if isinstance(output, tuple) else output
                if skipped == [index]:
                    leaving = entering
                added[index] = leaving - entering
                return (leaving, *output[1:]) if isinstance(output, tuple) else leaving

            return replace

        handles = [layer.register_forward_hook(hook(i)) for i, layer in enumerate(model.model.layers)]
        log_p = model(input_ids=inputs).logits.log_softmax(-1)
        p, top, clean = log_p.exp(), log_p.argmax(-1), dict(added)
        for s in range(depth):
            skipped[:] = [s]
            log_q = model(input_ids=inputs).logits.log_softmax(-1)
            q, gap = log_q.exp(), log_p - log_q
            outputs = [(p * gap).sum(-1), -(q * gap).sum(-1), (p - q).norm(dim=-1)]
            outputs += [gap.gather(-1, targets[..., None])[..., 0], (log_q.argmax(-1) == top).float()]
            effect = [
                (clean[k] - added[k]).norm(dim=-1) / clean[k].norm(dim=-1).clamp(min=1e-6)
                for k in range(s, depth)
            ]
            for values in outputs + effect:
                quantiles(values)
        for handle in handles:
            handle.remove()

    return forward if name == "torch forward" else skip


def worker(name: str, depth: int) -> None:
    """Answers every call with `[seconds, MiB]`: of the call, and what the process grew by."""
    if name.startswith("torch"):
        task = torch_task(name, depth)
    else:
        keep_freed_memory()
        task = jax_task(name, depth)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def work() -> tuple[float, float]:
        start = time.perf_counter()
        task()
        seconds = time.perf_counter() - start
        return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024

    serve(work)


def measure(depth: int, rounds: int, names: list[str]) -> None:
    """Lets the contenders work in turn and prints their rows; `-` for what another one is needed for."""
    contenders = {name: Contender(__file__, "--worker", name, "--depths", str(depth)) for name in names}
    first = {name: contender.call()[0] for name, contender in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in names}
    grown = dict.fromkeys(names, 0.0)
    for number in range(rounds + 1):
        for name in names if number % 2 == 0 else reversed(names):
            seconds, grown[name] = contenders[name].call()
            if number:  # the first round warms caches up
                times[name].append(seconds)
    for contender in contenders.values():
        contender.close()

    def ratio(of: str, to: str, per: int = 1) -> str:
        if to not in names:
            return "-"
        pairs = zip(times[of], times[to], strict=True)
        return f"{statistics.median(a / b for a, b in pairs) / per:.2f}"

    for name in names:
        unit = "torch forward" if name.startswith("torch") else "forward"
        per_pass = "-" if name in ("lens", "orders") else ratio(name, unit, depth + 1)
        compiled = "-" if name.startswith("torch") else f"{first[name] - statistics.median(times[name]):.1f}"
        print(
            f"| {depth} | {name} | {statistics.median(times[name]):.3f} | {ratio(name, 'forward')} | "
            f"{per_pass} | {ratio(name, 'skip')} | {compiled} | {grown[name]:.0f} |"
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depths", default="12,24")
    parser.add_argument("--contenders", default=";".join(CONTENDERS), help="some of them, between semicolons")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments.worker, int(arguments.depths))
    print(f"{os.cpu_count()} cores, {arguments.rounds} rounds")
    print("| layers | contender | s | forwards | own forwards / (L + 1) | to skip | compile s | MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for depth in map(int, arguments.depths.split(",")):
        measure(depth, arguments.rounds, arguments.contenders.split(";"))
    return None


if __name__ == "__main__":
    main()
