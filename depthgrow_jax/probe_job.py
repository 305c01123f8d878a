"""What every probe is given: settings that suit the machine, the prompts, and each probe's own extras."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from depthgrow_jax import results
from depthgrow_jax.data import Corpus
from depthgrow_jax.errors import UserError, require
from depthgrow_jax.probes.ablation import ablation
from depthgrow_jax.probes.ablation import check as check_ablation
from depthgrow_jax.probes.attribution import crop
from depthgrow_jax.probes.blocks import blocks
from depthgrow_jax.probes.config import ProbeConfig
from depthgrow_jax.probes.erasure import erasure
from depthgrow_jax.probes.geometry import geometry
from depthgrow_jax.probes.gradients import gradients
from depthgrow_jax.probes.inputs import Prompts, Subject, Watch, check_prompts
from depthgrow_jax.probes.integrated_gradients import integrated_gradients
from depthgrow_jax.probes.lens import check as check_lens
from depthgrow_jax.probes.lens import logit_lens
from depthgrow_jax.probes.linear_maps import check as check_maps
from depthgrow_jax.probes.linear_maps import linear_maps
from depthgrow_jax.probes.order import check as check_order
from depthgrow_jax.probes.order import order
from depthgrow_jax.probes.representations import check_tokens, representations
from depthgrow_jax.probes.result import Result
from depthgrow_jax.probes.scores import NEEDED, scores
from depthgrow_jax.probes.settings import Settings, check_counted
from depthgrow_jax.probes.tuned_lens import tuned_lens
from depthgrow_jax.probes.weights import check as check_weights
from depthgrow_jax.probes.weights import weights
from depthgrow_jax.prompts import Masking, from_corpus
from depthgrow_jax.subjects import Loaded
from depthgrow_jax.train.objective import masked_examples
from depthgrow_jax.train.start import architecture

# The probes whose results the scores are made of, and those whose they use where they are there.
SCORED = tuple(NEEDED)
ALSO_SCORED = ("gradients",)


class Job(NamedTuple):
    """One command's worth of probing.

    Attributes:
      prompts, settings, config: of all probes.
      loaded, other: the run, and the one it is compared with.
      corpus, mask: the run's data, and how a masked objective hides it.
      directory: where results are.
      made_of: probes that the scores are made of.
    """

    config: ProbeConfig
    settings: Settings
    loaded: Loaded
    prompts: Prompts
    corpus: Corpus
    mask: Masking | None
    other: Loaded | None
    directory: pathlib.Path
    made_of: tuple[str, ...]

    @property
    def subject(self) -> Subject:
        """The network that is probed."""
        return self.loaded.subject

    @property
    def inputs(self) -> tuple[Subject, Prompts, Settings]:
        """The first arguments of every probe that reads prompts."""
        return self.subject, self.prompts, self.settings

    @property
    def lens_inputs(self) -> tuple[Subject, Prompts, Settings]:
        """The same, for the lenses, whose pooling may be their own."""
        pooling = self.config.lens.pooling or self.settings.pooling
        return self.subject, self.prompts, dataclasses.replace(self.settings, pooling=pooling)

    @property
    def grown_block(self) -> int:
        """Layers that an event of the run added; 0 for a run without growth."""
        growth = self.loaded.config.growth
        return 0 if growth.operator == "none" else growth.block_size

    @property
    def weights_block(self) -> int:
        """Layers of a block whose weights are compared: of the config, else of the growth plan if it fits."""
        planned, depth = self.loaded.config.growth.block_size, self.loaded.meta["depth"]
        return self.config.similarity.block_size or (planned if depth % planned == 0 else 1)

    @property
    def twin(self) -> Subject | None:
        """The other network, if it has the same architecture and depth."""
        if self.other is None:
            return None
        theirs, ours = self.other.subject, self.subject
        same = theirs.steps == ours.steps and architecture(theirs.cfg) == architecture(ours.cfg)
        return theirs if same else None

    def held_out(self) -> Prompts:
        """Validation text on which a trained lens is judged."""
        length = self.loaded.config.train.sequence_length
        return from_corpus(self.corpus, self.config.tuned_lens.held_out, length, self.mask)

    def training_text(self) -> Iterator[np.ndarray]:
        """Batches of the run's training, int32 `[B, T + 1]`; what a masked model reads is hidden in them."""
        step = 0
        while True:
            tokens = self.corpus.train_batch(step, self.config.tuned_lens.batch_size, self.loaded.config.seed)
            if self.mask is not None:
                key = jax.random.key(step)
                hidden = masked_examples(jnp.asarray(tokens), key, self.mask.rate, self.mask.special)
                tokens = np.pad(np.asarray(hidden.inputs), ((0, 0), (0, 1)))
            yield tokens
            step += 1

    def scored(self) -> dict[str, Result]:
        """The finished results that scores are made of."""
        return {name: results.load(self.directory / f"{name}.json")[0] for name in self.made_of}


RUN: dict[str, Callable[[Job, Watch], Result]] = {
    "geometry": lambda job, watch: geometry(*job.inputs, watch=watch),
    "ablation": lambda job, watch: ablation(*job.inputs, job.config.ablation, watch=watch),
    "logit_lens": lambda job, watch: logit_lens(*job.lens_inputs, job.config.lens, watch=watch),
    "tuned_lens": lambda job, watch: tuned_lens(
        *job.lens_inputs,
        job.config.lens,
        job.config.tuned_lens,
        job.training_text(),
        job.held_out(),
        watch=watch,
    ),
    "order": lambda job, watch: order(*job.inputs, job.config.order, watch=watch),
    "gradients": lambda job, watch: gradients(*job.inputs, watch=watch),
    "erasure": lambda job, watch: erasure(*job.inputs, job.config.attribution, watch=watch),
    "integrated_gradients": lambda job, watch: integrated_gradients(
        *job.inputs, job.config.attribution, watch=watch
    ),
    "weights": lambda job, watch: weights(
        job.subject, job.settings, job.config.similarity, block_size=job.weights_block
    ),
    "representations": lambda job, watch: representations(*job.inputs, job.config.similarity, watch=watch),
    "linear_maps": lambda job, watch: linear_maps(
        job.subject,
        job.other.subject if job.other else job.subject,
        job.prompts,
        job.settings,
        job.config.similarity,
        watch=watch,
    ),
    "blocks": lambda job, watch: blocks(
        *job.inputs, job.config.blocks, growth_block=job.grown_block, other=job.twin, watch=watch
    ),
    "scores": lambda job, watch: scores(job.scored(), job.config.scores),
}


def check(job: Job, probes: tuple[str, ...]) -> None:
    """Refuses what a probe would refuse after minutes of work. Raises `UserError` naming the field."""
    check_prompts(job.subject, job.prompts)
    if job.other is not None:
        check_prompts(job.other.subject, job.prompts)
    if not {"geometry", "ablation", "logit_lens", "tuned_lens", "order", "gradients"}.isdisjoint(probes):
        check_counted(job.settings, job.prompts)
    if "logit_lens" in probes or "tuned_lens" in probes:
        check_lens(job.config.lens, job.subject.cfg.vocab_size)
    if "representations" in probes:
        check_tokens(job.settings, job.prompts)
    if "ablation" in probes:
        check_ablation(job.config.ablation, job.prompts)
    if "order" in probes:
        check_order(job.config.order, job.subject.steps)
    if "erasure" in probes or "integrated_gradients" in probes:
        crop(job.prompts, job.config.attribution)
    if "linear_maps" in probes:
        check_maps(job.prompts)
    if "weights" in probes:
        check_weights(job.subject.cfg, job.config.similarity, job.loaded.meta["depth"], job.weights_block)
    if "tuned_lens" in probes:
        job.held_out()
    if "scores" in probes and "ablation" in probes:
        modes, parts = job.config.ablation.modes, job.config.ablation.parts
        for quantity in NEEDED["ablation"]:
            mode, part, _ = quantity.split(".")
            require(mode in modes, "probe.ablation.modes", modes, f"must have {mode} for the scores")
            require(part in parts, "probe.ablation.parts", parts, f"must have {part} for the scores")


def resolve_settings(config: ProbeConfig, subject: Subject, prompts: Prompts) -> Settings:
    """The shared settings, with what the config leaves at 0 chosen for the machine.

    A CPU gets batches of about 2,048 tokens and blocks of 256 rows of logits, which its caches hold; an
    accelerator 16,384 tokens a device, if that leaves most of its memory free, and lanes for 32,768.
    """
    examples, length = prompts.inputs.shape
    batch, lanes, chunk_bytes = 2048 // length, 1, 4 * 256 * subject.cfg.vocab_size
    on_cpu = jax.default_backend() == "cpu"
    if not on_cpu:
        # Of every point of the stream about three copies live at once.
        prompt_bytes = 3 * (subject.steps + 1) * length * subject.cfg.width * jnp.dtype(config.dtype).itemsize
        batch = min(16384 // length, _device_bytes() // 4 // prompt_bytes) * subject.devices
        chunk_bytes = 256 << 20
    batch = config.batch_size or max(1, batch)
    if not on_cpu:
        lanes = max(1, 32768 * subject.devices // (min(batch, examples) * length))
    return Settings(
        config.protect,
        config.uncounted,
        config.pooling,
        config.headline,
        batch,
        config.lanes or lanes,
        config.chunk_bytes or chunk_bytes,
    )


def _device_bytes() -> int:
    """Memory of a device; 8 GiB where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 8 << 30)


def check_same_tokens(ours: Loaded, theirs: Loaded, corpus: Corpus, other_corpus: Corpus) -> None:
    """Raises `UserError` unless both runs mean the same text by the same ids."""
    if corpus.tokenizer.fingerprint != other_corpus.tokenizer.fingerprint:
        raise UserError(
            f"--other: {theirs.facts['run']} has another tokenizer than {ours.facts['run']}, which reads the "
            "same prompts otherwise"
        )
