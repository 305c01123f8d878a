"""The glue of `launch.py probe`: a checkpoint, prompts and settings in; one result file a probe out."""

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import depthgrow_jax
from depthgrow_jax import probe_job, results
from depthgrow_jax.config import flatten, to_dict
from depthgrow_jax.corpora import corpus_of
from depthgrow_jax.data import Corpus
from depthgrow_jax.data.config import DataConfig
from depthgrow_jax.errors import UserError, require
from depthgrow_jax.interop import is_reference
from depthgrow_jax.probe_job import ALSO_SCORED, RUN, SCORED, Job
from depthgrow_jax.probe_plan import TEXT, Plan
from depthgrow_jax.probes.config import PROBES, ProbeConfig
from depthgrow_jax.probes.inputs import Prompts
from depthgrow_jax.probes.result import Result
from depthgrow_jax.probes.settings import counted
from depthgrow_jax.prompts import facts, from_corpus, from_file, masking
from depthgrow_jax.report.probe_table import probe_table
from depthgrow_jax.rundir import locked, open_directory
from depthgrow_jax.subjects import Loaded, load_network
from depthgrow_jax.telling import line, watch

# Fields of `ProbeConfig` that decide the numbers of every probe, and the groups that decide those of one.
_SHARED = ("protect", "uncounted", "pooling", "headline", "dtype", "prompts")
_OWN = {
    "geometry": (),
    "ablation": ("ablation",),
    "logit_lens": ("lens",),
    "tuned_lens": ("lens", "tuned_lens"),
    "order": ("order",),
    "gradients": (),
    "erasure": ("attribution",),
    "integrated_gradients": ("attribution",),
    "weights": ("similarity",),
    "representations": ("similarity",),
    "linear_maps": ("similarity",),
    "blocks": ("blocks",),
    "scores": ("ablation", "lens", "scores"),
}
_TWO_NETWORKS = ("linear_maps", "blocks")


def probe_network(
    place: str,
    plan: Plan,
    *,
    flag: str = "--run",
    step: int | None = None,
    out: str | None = None,
    other: str | None = None,
) -> int:
    """Runs the probes that are not finished, and prints a table of all that were asked for.

    Everything that can be wrong is looked for before the first probe runs. Each result is written when its
    probe is done, so that a command that is stopped goes on where it was.

    Args:
      place: directory of a run, or a reference to a pretrained network.
      plan: results go to `probes/step{N}-{plan.name}` in the run.
      flag: what named the place, for errors.
      step: of the checkpoint; None for the newest.
      out: another directory for the results; a pretrained network needs one.
      other: a second network for the probes that compare two.

    Returns the exit code, 0. Raises `UserError` for anything the user can mend.
    """
    name, config, text, mesh = plan
    probes = tuple(probe for probe in PROBES if not config.probes or probe in config.probes)
    _check_places(place, flag, text, out, other)
    shown: dict[str, Any] = {
        "text": text,
        "length": config.prompts.length,
        "dtype": config.dtype,
        "mesh": mesh,
    }
    loaded = load_network(place, step, flag=flag, **shown)
    rival = None
    if other:
        rival = load_network(other, flag="--other", **shown)
    corpus = corpus_of(loaded, line)
    if rival is not None:
        probe_job.check_same_tokens(loaded, rival, corpus, corpus_of(rival, line))
    prompts, prompt_facts = _prompts(config, loaded, corpus)
    if out is None:
        directory = pathlib.Path(place).expanduser() / "probes" / f"step{loaded.step}-{name}"
    else:
        directory = pathlib.Path(out).expanduser()
    requests = {p: _request(p, config, loaded, corpus, prompt_facts, rival) for p in PROBES}
    finished, made_of = _finished(directory, probes, requests)
    job = Job(
        config,
        probe_job.resolve_settings(config, loaded.subject, prompts),
        loaded,
        prompts,
        corpus,
        masking(loaded.config.train, corpus),
        rival,
        directory,
        made_of,
    )
    probe_job.check(job, tuple(probe for probe in probes if probe not in finished))
    if loaded.pretrained is None and not (pathlib.Path(place).expanduser() / "DONE").exists():
        line(f"{loaded.facts['run']}: training is not finished; this is its step {loaded.step}")
    if rival is not None and job.twin is None and "blocks" in probes:
        line("blocks: --other has another architecture or depth, so no layers are transplanted")
    header = loaded.facts | {
        "data_hash": corpus.data_hash,
        "prompts": prompt_facts,
        "preset": name,
        "other": rival.facts if rival else None,
        "dtype": config.dtype,
        "devices": loaded.subject.devices,
        "settings": dataclasses.asdict(job.settings),
        "versions": {"jax": jax.__version__, "depthgrow_jax": depthgrow_jax.__version__},
    }
    with locked(open_directory(directory, "--out" if out else "--run")):
        for probe in probes:
            if probe in finished:
                line(f"{probe}: already done")
            else:
                _run_probe(probe, job, header | {"request": requests[probe]})
    after = "" if loaded.pretrained else f" after step {loaded.step}"
    print(f"{loaded.facts['run']}{after}: {directory}\n")
    found = {probe: results.load(directory / f"{probe}.json")[0] for probe in probes}
    print(probe_table(found, config.headline))
    return 0


def _check_places(place: str, flag: str, text: DataConfig, out: str | None, other: str | None) -> None:
    """Raises `UserError` for what fits a run or a pretrained network, but not what is given."""
    pretrained = is_reference(place)
    if pretrained and out is None:
        raise UserError(f"{flag}={place!r}: has no directory of its own; give one for the results with --out")
    if not pretrained and not is_reference(other or "") and text != TEXT:
        raise UserError("--config.data: is the text of a pretrained network; a run is shown its own")


def _run_probe(probe: str, job: Job, header: dict[str, Any]) -> None:
    """Runs one probe and writes its result."""
    start = time.perf_counter()
    exact = job.config.dtype == "float32"
    with jax.default_matmul_precision("highest") if exact else contextlib.nullcontext():
        try:
            result = RUN[probe](job, watch)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise UserError(
                f"{probe}: does not fit into memory with probe.batch_size={job.settings.batch_size}, "
                f"probe.lanes={job.settings.lanes}, probe.chunk_bytes={job.settings.chunk_bytes}; lower them"
            ) from None
    seconds = time.perf_counter() - start
    result = _with_prompts(result, job, header["prompts"], header["request"]["other"])
    results.save(job.directory, result, header | {"seconds": seconds})
    line(f"{probe}: {seconds:.1f} s")


def _with_prompts(result: Result, job: Job, prompts: dict[str, Any], other: str) -> Result:
    """Adds what only the glue knows and a comparison needs: text, second network, tokens that count."""
    words, arrays = dict(result.conventions), dict(result.arrays)
    if result.probe in _TWO_NETWORKS:
        words["other network"] = other or "none, or itself"
    if result.examples:
        size = f"{prompts['examples']} of at most {prompts['length']} tokens"
        words["prompts"] = f"{size}, text {prompts['text']}"
    if result.examples == len(job.prompts.inputs):
        arrays["counted_tokens"] = np.asarray(counted(job.settings, job.prompts))
    return result._replace(conventions=words, arrays=arrays)


def _prompts(config: ProbeConfig, loaded: Loaded, corpus: Corpus) -> tuple[Prompts, dict[str, Any]]:
    length = config.prompts.length or loaded.config.train.sequence_length
    legal = f"must be at most {loaded.context}, the longest sequence that the network is made for"
    require(length <= loaded.context or not loaded.pretrained, "probe.prompts.length", length, legal)
    mask = masking(loaded.config.train, corpus)
    if not config.prompts.path:
        prompts = from_corpus(corpus, config.prompts.examples, length, mask)
        whose = "the text that it is shown" if loaded.pretrained else "the run's data"
        return prompts, facts(prompts, f"validation split of {whose}")
    prompts, found = from_file(config.prompts, corpus.tokenizer, length, loaded.config.model.vocab_size, mask)
    if found["cut"]:
        line(
            f"prompts: {found['cut']} of {found['examples']} are cut to {length} tokens, "
            f"{found['answers_cut_off']} of them before their answer"
        )
    return prompts, found


def _request(
    probe: str,
    config: ProbeConfig,
    loaded: Loaded,
    corpus: Corpus,
    prompts: dict[str, Any],
    rival: Loaded | None,
) -> dict[str, Any]:
    """What decides a probe's numbers, flat, as JSON values."""
    fields = {name: to_dict(getattr(config, name)) for name in (*_SHARED, *_OWN[probe])}
    run = {"config_hash": loaded.meta["config_hash"], "data_hash": corpus.data_hash}
    compared = f"{rival.meta['config_hash']} step {rival.step}" if rival and probe in _TWO_NETWORKS else ""
    request = {f"probe.{field}": value for field, value in flatten(fields).items()}
    request |= {"step": loaded.step, **run, "prompts": prompts["sha256"], "other": compared}
    return json.loads(json.dumps(request))


def _finished(
    directory: pathlib.Path, probes: Sequence[str], requests: dict[str, dict[str, Any]]
) -> tuple[set[str], tuple[str, ...]]:
    """Which of `probes` are done, and the probes that the scores are made of.

    Raises `UserError` for results that were made with another request, and for scores without what they need.
    """
    sources = (*SCORED, *ALSO_SCORED) if "scores" in probes else ()
    measured = [p for p in PROBES if p in (*probes, *sources) and p != "scores"]
    done = {p for p in measured if _is_done(directory / f"{p}.json", requests[p])}
    made_of = tuple(p for p in sources if p in done or p in probes)
    if "scores" in probes:
        requests["scores"]["made_of"] = list(made_of)
        if _is_done(directory / "scores.json", requests["scores"]):
            done.add("scores")
        missing = [p for p in SCORED if p not in made_of]
        if missing:
            raise UserError(
                f"--probes={','.join(probes)}: scores are made of {', '.join(missing)} too; name them as well"
            )
    return done & {*probes}, made_of


def _is_done(path: pathlib.Path, request: dict[str, Any]) -> bool:
    """Whether there is a result of this request. Raises `UserError` if there is one of another."""
    if not path.exists():
        return False
    stored = results.describe(path)["header"].get("request")
    if not isinstance(stored, dict):
        raise UserError(f"{path}: does not say with which settings it was made; remove it")
    differing = sorted(name for name in {*stored, *request} if stored.get(name) != request.get(name))
    if stored.get("prompts") == request["prompts"]:
        # The same tokens, whatever led to them.
        differing = [name for name in differing if not name.startswith("probe.prompts.")]
    if differing == ["made_of"]:
        return False
    if differing:
        shown = "; ".join(f"{n} was {stored.get(n)!r}, now {request.get(n)!r}" for n in differing)
        raise UserError(f"{path}: was made with other settings ({shown}); use --out=DIR")
    return True
