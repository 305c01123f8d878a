"""Settings of the probes, family by family, and the presets that fix a reference's conventions."""

import dataclasses
from typing import Any

from depthgrow_jax.errors import require, require_choice
from depthgrow_jax.probes import settings as shared

PROBES = (
    "geometry",
    "ablation",
    "logit_lens",
    "tuned_lens",
    "order",
    "gradients",
    "erasure",
    "integrated_gradients",
    "weights",
    "representations",
    "linear_maps",
    "blocks",
    "scores",
)
PARTS = ("layer", "attention", "attention_direct", "mlp", "mean", "resample")
MODES = ("current", "future", "local_current", "local_future")
RULES = ("legendre", "left")
TARGETS = ("log_prob", "prob")
BASELINES = ("dataset", "prompt")
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class PromptConfig:
    """What the network reads.

    Attributes:
      path: a `.jsonl` file of prompts; empty for held-out text of the run's own data.
      template: what a record with a prompt and an answer becomes; `{prompt}` and `{answer}` are filled in.
      examples: prompts to use, the first of the file; fewer if there are fewer.
      length: positions of a prompt at most; longer ones are cut. 0: the sequence length of the run.
      separator_first: put the separator, which ends every document in training, before a prompt of a file.
    """

    path: str = ""
    template: str = "{prompt}\n{answer}"
    examples: int = 16
    length: int = 0
    separator_first: bool = True


@dataclasses.dataclass(frozen=True)
class AblationConfig:
    """What is removed, and where the effect is measured.

    Attributes:
      parts: of `PARTS`. `layer`, `attention`, `mlp`: zero ablation of that contribution, `attention` with the
        MLP reading the damaged stream (total), `attention_direct` with the MLP's output kept; `mean` and
        `resample`: the layer's contribution replaced by its mean, or by another prompt's.
      modes: of `MODES`. The `local` modes measure each later layer alone, on the clean stream less what the
        layer adds.
      splits: positions t of a prompt at which `future` modes split it; layers are skipped before t and
        measured from t on.
      split_first, split_stride, split_last: candidates are split_first, split_first + split_stride, ... up to
        T - split_last; shuffled by `split_seed`, the first `splits` are taken.
    """

    parts: tuple[str, ...] = PARTS
    modes: tuple[str, ...] = MODES
    splits: int = 4
    split_first: int = 8
    split_stride: int = 8
    split_last: int = 5
    split_seed: int = 123


@dataclasses.dataclass(frozen=True)
class TunedLensConfig:
    """Training of the tuned lens.

    Attributes:
      steps, batch_size: updates, and sequences of the run's length in each.
      learning_rate: of Adam at the start; decays linearly to 0.
      held_out: sequences of held-out text on which its loss is reported.
    """

    steps: int = 60
    batch_size: int = 4
    learning_rate: float = 3e-3
    held_out: int = 16


@dataclasses.dataclass(frozen=True)
class LensConfig:
    """Both lenses.

    Attributes:
      top_k: of the top-k overlap.
      pooling: as `probe.pooling`, of the lenses alone; empty for the same.
    """

    top_k: int = 5
    pooling: str = ""


@dataclasses.dataclass(frozen=True)
class OrderConfig:
    """Which orders are tried.

    Attributes:
      run_lengths: lengths of the runs that are moved; empty for those of 1, 2, 4, 8 that the depth allows.
      permutations: random orders of each run.
      seed: of the random orders.
    """

    run_lengths: tuple[int, ...] = ()
    permutations: int = 1
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class AttributionConfig:
    """Erasure and integrated gradients: maps over (layer, token) of a few prompts.

    Attributes:
      examples: of the prompts, the first.
      length: positions of a prompt that has no answer.
      answer_length: positions of the answer: its first, or the last of a prompt that has none.
      nodes: points on the path of integrated gradients.
      rule: `legendre` (Gauss-Legendre) or `left` (left Riemann sums, as Csordas et al.).
      target: what is attributed: the sum of `log_prob` or of `prob` of the answer's tokens.
      baseline: where the path starts: the mean state of the layer over the `dataset` or over the `prompt`.
      erasure_baseline: the same, of what replaces an erased state.
      uncounted: first positions left out of these means.
    """

    examples: int = 3
    length: int = 64
    answer_length: int = 8
    nodes: int = 32
    rule: str = "legendre"
    target: str = "log_prob"
    baseline: str = "dataset"
    erasure_baseline: str = "dataset"
    uncounted: int = 1


@dataclasses.dataclass(frozen=True)
class SimilarityConfig:
    """Weights, representations and linear maps.

    Attributes:
      block_size: layers of a block whose weights are compared; 0: the block of the run's growth.
      rank: dimensions of a subspace; 0: an eighth of the width.
      draws: random matrices behind each baseline.
      cka_tokens: tokens of a prompt that CKA uses at most.
      ridge: penalty of the linear maps, relative to the mean variance of the source.
      seed: of baselines and of the split into fitted and held-out prompts.
    """

    block_size: int = 0
    rank: int = 0
    draws: int = 20
    cka_tokens: int = 256
    ridge: float = 1e-3
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class BlocksConfig:
    """Permutable blocks.

    Attributes:
      longest: layers of a block at most.
      resamples: of the prompts, for the stability of the borders.
      shuffles: of the layers, for the null.
      seed: of both.
    """

    longest: int = 4
    resamples: int = 200
    shuffles: int = 500
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class ScoresConfig:
    """Thresholds of the effective depths (arXiv 2512.14064).

    Attributes:
      kl_threshold: of the lens KL, relative to its largest value.
      overlap_threshold: of the top-k overlap.
      shuffles: of the layers, for the nulls.
      seed: of the shuffles.
    """

    kl_threshold: float = 0.5
    overlap_threshold: float = 0.3
    shuffles: int = 1000
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class ProbeConfig:
    """Everything `launch.py probe` can be told.

    Attributes:
      probes: which; empty for all of `PROBES`.
      protect, uncounted, pooling, headline, batch_size, lanes, chunk_bytes: see `settings.Settings`; 0 for
        `batch_size`, `lanes` and `chunk_bytes` chooses by the size of the model and the device.
      dtype: of the computation.
      (the groups: see their classes)
    """

    probes: tuple[str, ...] = ()
    protect: int = 0
    uncounted: int = 1
    pooling: str = "tokens"
    headline: str = "mean"
    batch_size: int = 0
    lanes: int = 0
    chunk_bytes: int = 0
    dtype: str = "float32"
    prompts: PromptConfig = PromptConfig()
    ablation: AblationConfig = AblationConfig()
    lens: LensConfig = LensConfig()
    tuned_lens: TunedLensConfig = TunedLensConfig()
    order: OrderConfig = OrderConfig()
    attribution: AttributionConfig = AttributionConfig()
    similarity: SimilarityConfig = SimilarityConfig()
    blocks: BlocksConfig = BlocksConfig()
    scores: ScoresConfig = ScoresConfig()


_CSORDAS_TEMPLATE = (
    "Given the following problem, reason and give a final answer to the problem.\nProblem: {prompt}\n"
    'Your response should end with "The final answer is [answer]" where [answer] is the response to the '
    "problem.\n{answer}"
)
# Of Csordas et al. (arXiv 2505.13898); `paper` is Kapl et al. (arXiv 2512.08819): docs/probes.md.
_CSORDAS: dict[str, Any] = {
    "protect": 1,
    "uncounted": 0,
    "headline": "max",
    "prompts": {"template": _CSORDAS_TEMPLATE, "examples": 10},
    "lens": {"pooling": "examples"},
    "attribution": {"nodes": 256, "rule": "left", "target": "prob", "baseline": "prompt", "uncounted": 0},
}
# What says most about a large model on a small machine: nothing that is trained, or run once for each token.
_QUICK = (
    "geometry",
    "ablation",
    "logit_lens",
    "order",
    "gradients",
    "weights",
    "representations",
    "blocks",
    "scores",
)
PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "csordas": _CSORDAS,
    "paper": {**_CSORDAS, "headline": "mean_of_max"},
    "quick": {
        "probes": _QUICK,
        "prompts": {"examples": 8, "length": 64},
        "ablation": {"parts": ("layer", "attention", "mlp"), "modes": ("current", "future"), "splits": 1},
        "order": {"run_lengths": (1, 2)},
        "blocks": {"longest": 2},
    },
}


def validate(cfg: ProbeConfig) -> None:
    """Refuses settings that mean nothing. Raises `UserError` naming the field."""
    for name in cfg.probes:
        require_choice("probe.probes", name, PROBES)
    require(len(set(cfg.probes)) == len(cfg.probes), "probe.probes", cfg.probes, "must not repeat a probe")
    for field, least in (("batch_size", 0), ("lanes", 0), ("chunk_bytes", 0)):
        value = getattr(cfg, field)
        require(value >= least, f"probe.{field}", value, "must be 0 (automatic) or more")
    shared.validate(shared.Settings(cfg.protect, cfg.uncounted, cfg.pooling, cfg.headline))
    for field, choices in (
        ("dtype", DTYPES),
        ("lens.pooling", ("", *shared.POOLINGS)),
        ("attribution.rule", RULES),
        ("attribution.target", TARGETS),
        ("attribution.baseline", BASELINES),
        ("attribution.erasure_baseline", BASELINES),
    ):
        require_choice(f"probe.{field}", _get(cfg, field), choices)
    for field, choices in (("ablation.parts", PARTS), ("ablation.modes", MODES)):
        for name in _get(cfg, field):
            require_choice(f"probe.{field}", name, choices)
        require(len(_get(cfg, field)) > 0, f"probe.{field}", (), "must name at least one")
    for field in (
        "prompts.examples",
        "ablation.splits",
        "ablation.split_first",
        "ablation.split_stride",
        "lens.top_k",
        "tuned_lens.steps",
        "tuned_lens.batch_size",
        "tuned_lens.held_out",
        "order.permutations",
        "attribution.examples",
        "attribution.length",
        "attribution.answer_length",
        "attribution.nodes",
        "similarity.draws",
        "blocks.longest",
        "blocks.resamples",
        "blocks.shuffles",
        "scores.shuffles",
    ):
        require(_get(cfg, field) >= 1, f"probe.{field}", _get(cfg, field), "must be at least 1")
    for field in (
        "prompts.length",
        "ablation.split_seed",
        "order.seed",
        "attribution.uncounted",
        "similarity.block_size",
        "similarity.rank",
        "similarity.seed",
        "blocks.seed",
        "scores.seed",
    ):
        require(_get(cfg, field) >= 0, f"probe.{field}", _get(cfg, field), "must be 0 or more")
    tokens = cfg.similarity.cka_tokens
    require(tokens >= 4, "probe.similarity.cka_tokens", tokens, "must be at least 4 (unbiased HSIC)")
    last = cfg.ablation.split_last
    require(last >= 2, "probe.ablation.split_last", last, "must be at least 2, to leave a token to measure")
    for field in ("tuned_lens.learning_rate", "similarity.ridge"):
        require(_get(cfg, field) > 0, f"probe.{field}", _get(cfg, field), "must be above 0")
    for field in ("scores.kl_threshold", "scores.overlap_threshold"):
        require(0 < _get(cfg, field) < 1, f"probe.{field}", _get(cfg, field), "must lie between 0 and 1")
    for length in cfg.order.run_lengths:
        require(length >= 1, "probe.order.run_lengths", cfg.order.run_lengths, "must be positive")
    template = cfg.prompts.template
    for part in ("{prompt}", "{answer}"):
        require(template.count(part) == 1, "probe.prompts.template", template, f"must hold {part} once")


def _get(cfg: Any, field: str) -> Any:
    for name in field.split("."):
        cfg = getattr(cfg, name)
    return cfg
