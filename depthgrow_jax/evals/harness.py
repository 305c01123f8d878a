"""The networks of this project as a model of lm-evaluation-harness (`lm_eval`, an optional dependency).

    python -m depthgrow_jax.evals.harness --model depthgrow --model_args run=DIR,program=0-3+2-3 --tasks NAME

is the command `lm_eval` with the model `depthgrow` known to it. lm_eval 0.4.13 looks for models in its own
package alone, neither by entry points nor by --include_path: a program imports this module before it calls
`lm_eval.simple_evaluate(model="depthgrow", model_args="run=DIR")`. JAX chooses the device: `--device` does
nothing. The command reads one sequence at once unless it is told otherwise, for instance `--batch_size auto`.

Scores and greedy texts are those of the model `hf` on the same checkpoint: what is context, what is cut, what
stands for an empty context, which windows a long text is read in. Of `generation_config.json` only the ids
that end a text count here, where `hf` would also apply a repetition penalty that it asks for.
"""

import json
import logging
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import absl.logging
import jax
import numpy as np
from tqdm import tqdm

from depthgrow_jax.corpora import vocabulary_of
from depthgrow_jax.errors import UserError, require, require_choice
from depthgrow_jax.evals.harness_text import HarnessText
from depthgrow_jax.evals.scoring import log_likelihoods
from depthgrow_jax.evals.trees import Request
from depthgrow_jax.executables import keep_executables
from depthgrow_jax.interop import is_reference
from depthgrow_jax.model import Sampling, check_sampling, generate, parse_order, reorder
from depthgrow_jax.model.config import DTYPES
from depthgrow_jax.probes.inputs import Watch
from depthgrow_jax.subjects import load_network

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
except ModuleNotFoundError as missing:
    _message = f"lm-evaluation-harness cannot be imported ({missing}): pip install lm-eval==0.4.13"
    if __name__ == "__main__":
        print(f"error: {_message}", file=sys.stderr)
        sys.exit(2)
    raise UserError(_message) from missing

_LOGGER = logging.getLogger("lm_eval.depthgrow")
# Texts that are generated at once where the user leaves the choice.
_ROWS = 16
# Answers that are handed to the harness's cache at once: no more than these are lost with the process.
_SAVED_TOGETHER = 1024
# What `transformers` draws among when nothing is said.
_TOP_K, _TOP_P = 50, 1.0
_ARGUMENTS = "run, model, step, program, dtype, batch_size, max_length, max_gen_toks, add_bos_token"
_GENERATION = "until, max_gen_toks, do_sample, temperature, top_k, top_p"


class _Generation(NamedTuple):
    sampling: Sampling
    max_tokens: int
    stops: list[str]


@register_model("depthgrow")
class DepthgrowLM(TemplateLM):
    """A run or a pretrained network, under any order of its layers.

    Sampling, where a task asks for it, follows numpy's global seed, which `--seed` of the harness sets.
    """

    def __init__(
        self,
        run: str | None = None,
        model: str | None = None,
        step: int | None = None,
        program: str | int | None = None,
        dtype: str = "float32",
        batch_size: int | str = "auto",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        **unknown,
    ):
        """Loads the network.

        Args:
          run: directory of a run.
          model: `hf:...` or `gguf:...`; one of the two.
          step: of the run's checkpoint; None for the newest.
          program: the layers to run, such as `0-3+2-3+5`. Parts are joined by `+`, because the harness splits
            arguments at commas; where they arrive whole (a dict), commas do as well.
          dtype: of the computation.
          batch_size: sequences at once; short ones share the room of a long one. `auto` chooses.
          max_length: tokens of context and continuation; None for what the network is made for.
          max_gen_toks: new tokens of a task that does not say how many.
          add_bos_token: whether texts follow the beginning-of-sequence token; None: as the tokenizer has it.
          unknown: what the harness passes on and this model does not take.

        Raises `UserError` for arguments that are not legal, and as `subjects.load_network`.
        """
        super().__init__()
        for name, value in unknown.items():
            joined = "; parts of a program are joined by +" if name[:1].isdigit() else ""
            raise UserError(f"{name}={value!r}: is no argument of depthgrow; legal: {_ARGUMENTS}{joined}")
        if (run is None) == (model is None):
            raise UserError(f"run={run!r}, model={model!r}: must be one of the two")
        if model is not None and not is_reference(str(model)):
            raise UserError(
                f"model={model!r}: is no model; must be hf:DIR, hf:org/name, gguf:FILE or gguf:PACKAGE"
            )
        require(step is None or isinstance(step, int), "step", step, "must be the number of a checkpoint")
        require_choice("dtype", dtype, DTYPES)
        require(
            batch_size == "auto" or _count(batch_size), "batch_size", batch_size, "must be auto, 1 or more"
        )
        require(_count(max_gen_toks), "max_gen_toks", max_gen_toks, "must be 1 or more")
        flag = "model" if run is None else "run"
        loaded = load_network(str(run or model), step, flag=flag, dtype=dtype)
        self.subject = loaded.subject
        require(
            self.subject.cfg.causal, flag, run or model, "is bidirectional, which harness tasks cannot use"
        )
        if program is not None:
            order = parse_order(str(program).replace("+", ","), self.subject.steps, "program")
            self.subject = self.subject._replace(program=reorder(self.subject.program, order))
        legal = f"must be 1 to {loaded.context}, the context of the network"
        valid = max_length is None or (_count(max_length) and int(max_length) <= loaded.context)
        require(valid, "max_length", max_length, legal)
        self.max_length = int(max_length or loaded.context)
        self.max_gen_toks = int(max_gen_toks)
        self.batch_size = batch_size if batch_size == "auto" else int(batch_size)
        vocabulary = vocabulary_of(loaded, _line)
        if vocabulary is None:
            raise UserError(f"{flag}={run or model!r}: comes without a tokenizer, which the harness needs")
        self.text = HarnessText(vocabulary, add_bos_token)
        self._ends = tuple({*vocabulary.ends, self.text.end})
        self._facts = loaded.facts | {"program": program, "dtype": dtype, "max_length": self.max_length}

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> "DepthgrowLM":
        """The model of `run=DIR,program=0-3+2-3`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict, additional_config: dict | None = None) -> "DepthgrowLM":
        """The model of `arg_dict`, which is what counts where the harness passes the same argument again."""
        given = {name: value for name, value in (additional_config or {}).items() if value is not None}
        given.pop("device", None)  # the command always passes one: cuda:0
        return cls(**given | arg_dict)

    @property
    def eot_token_id(self) -> int:
        return self.text.end

    @property
    def prefix_token_id(self) -> int:
        return self.text.prefix

    @property
    def tokenizer_name(self) -> str:
        return str(self._facts["run"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt=True) -> str:
        raise UserError("--apply_chat_template: depthgrow has no chat templates; leave it out")

    def get_model_info(self) -> dict[str, Any]:
        """What results say of the network: which run, which step, how it grew, which layers ran."""
        return {"depthgrow": self._facts}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """See `HarnessText.encode`."""
        return self.text.encode(string, add_special_tokens)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log probability, whether it is the greedy continuation) of each (context, continuation).

        Raises `UserError` for a continuation without a token of its own, or longer than `max_length`.
        """
        encoded = []
        for request in tqdm(requests, desc="encoding", disable=disable_tqdm):
            context, continuation = _arguments(request)
            if context:
                before, after = self._encode_pair(context, continuation)
            else:
                before, after = [], self.tok_encode(continuation, add_special_tokens=False)
                if after[:1] == [self.text.prefix]:
                    before, after = after[:1], after[1:]
            encoded.append(((context, continuation), before or [self.text.prefix], after))
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs,
    ) -> list[tuple[float, bool]]:
        asked = [self._request(*request) for request in requests]
        longer = sum(len(before) + len(after) > self.max_length + 1 for _, before, after in requests)
        self._warn_of_cuts(longer, len(requests))
        room = 0 if isinstance(self.batch_size, str) else self.batch_size * self.max_length
        answers: list[tuple[float, bool]] = []
        for start in range(0, len(requests), _SAVED_TOGETHER):
            part = asked[start : start + _SAVED_TOGETHER]
            found = log_likelihoods(self.subject, part, batch_tokens=room, watch=_bar(disable_tqdm))
            for (texts, _, _), answer in zip(requests[start : start + len(part)], found, strict=True):
                answers.append((answer.log_prob, answer.greedy))
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    def _request(self, texts: tuple[str, str] | None, before: list[int], after: list[int]) -> Request:
        """Cut from the left to what is read: all but the last token."""
        if not 1 <= len(after) <= self.max_length:
            context, continuation = texts or ("", "")
            raise UserError(
                f"continuation={continuation[:40]!r} after context={context[-40:]!r}: has {len(after)} "
                f"tokens of its own; must have 1 to max_length={self.max_length}"
            )
        return Request(tuple(before[-(self.max_length + 1 - len(after)) :]), tuple(after))

    def _warn_of_cuts(self, cut: int, total: int) -> None:
        if cut:
            _LOGGER.warning(
                "%d of %d requests are cut from the left to %d tokens", cut, total, self.max_length
            )

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log probability of each text, read in windows of `max_length`; each token is predicted once."""
        windows, counts = [], []
        for (text,) in map(_arguments, requests):
            parts = get_rolling_token_windows(self.tok_encode(text), self.text.prefix, self.max_length, 1)
            of_text = [(None, *make_disjoint_window(part)) for part in parts]
            windows += of_text
            counts.append(len(of_text))
        found = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        totals = []
        for request, count in zip(requests, counts, strict=True):
            totals.append(sum(next(found)[0] for _ in range(count)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to the first of its stop texts or the end of the text.

        Raises `UserError` for generation settings that this model does not have.
        """
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(_arguments(request)[1], sort_keys=True), []).append(index)
        settings = [self._settings(_arguments(requests[group[0]])[1]) for group in groups.values()]
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="generating", disable=disable_tqdm) as bar:
            for group, generation in zip(groups.values(), settings, strict=True):
                contexts = [_arguments(requests[index])[0] for index in group]
                for numbers, text in self._generate(contexts, generation):
                    for index in (group[number] for number in numbers):
                        texts[index] = text
                        self.cache_hook.add_partial("generate_until", requests[index].args, text)
                    bar.update(len(numbers))
        return texts

    def _settings(self, given: dict[str, Any]) -> _Generation:
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        stops = handle_stop_sequences(kwargs.pop("until"), self.text.end_text)
        max_tokens, do_sample = kwargs.pop("max_gen_toks"), kwargs.pop("do_sample")
        temperature = float(kwargs.pop("temperature", 0.0))
        top_k, top_p = kwargs.pop("top_k", _TOP_K), kwargs.pop("top_p", _TOP_P)
        if kwargs.get("num_beams") == 1:
            del kwargs["num_beams"]
        for name, value in kwargs.items():
            raise UserError(f"generation_kwargs: {name}={value!r} is not supported; legal: {_GENERATION}")
        field = "generation_kwargs: max_gen_toks"
        require(1 <= max_tokens < self.max_length, field, max_tokens, f"must be 1 to {self.max_length - 1}")
        if not do_sample:
            return _Generation(Sampling(), max_tokens, stops)
        require(temperature > 0, "generation_kwargs: temperature", temperature, "must be above 0 to sample")
        sampling = Sampling(temperature, top_k, top_p)
        check_sampling(sampling, "generation_kwargs: ")
        return _Generation(sampling, max_tokens, stops)

    def _generate(self, contexts: Sequence[str], generation: _Generation) -> Iterator[tuple[list[int], str]]:
        """(indices of contexts, what follows them), longest first. Equal ones share a greedy text."""
        sampling, max_tokens, stops = generation
        room, greedy = self.max_length - max_tokens, sampling.temperature == 0
        wanted: dict[tuple, list[int]] = {}
        cut = 0
        for number, text in enumerate(contexts):
            ids = self.tok_encode(text) or [self.text.prefix]
            cut += len(ids) > room
            wanted.setdefault((tuple(ids[-room:]), 0 if greedy else number), []).append(number)
        self._warn_of_cuts(cut, len(contexts))
        jobs = sorted(wanted.items(), key=lambda job: -len(job[0][0]))
        rows = _ROWS if isinstance(self.batch_size, str) else self.batch_size
        # A text is made on one device: it is bound by the weights that it reads.
        params = jax.tree.map(lambda leaf: leaf.addressable_data(0), self.subject.params)

        def stopped(_: int, made: list[int]) -> bool:
            text = self.text.decode(made)
            return any(stop and stop in text for stop in stops)

        for start in range(0, len(jobs), rows):
            part = jobs[start : start + rows]
            found = generate(
                self.subject.cfg,
                params,
                [ids for (ids, _), _ in part],
                max_tokens=max_tokens,
                sampling=sampling,
                seed=0 if greedy else int(np.random.randint(2**31)),
                program=self.subject.program,
                ends=self._ends,
                stopped=stopped,
            )
            for (_, numbers), made in zip(part, found, strict=True):
                text = self.text.decode(made.ids)
                yield numbers, postprocess_generated_text(text, stops, None)


def _arguments(request: Instance) -> tuple[Any, ...]:
    return request.args


def _count(value: object) -> bool:
    """Whether it is a number from 1 on; the harness passes some numbers as texts."""
    return not isinstance(value, bool) and str(value).isdecimal() and int(str(value)) >= 1


def _bar(disabled: bool) -> Watch:
    return lambda what, total, items: iter(tqdm(items, desc=what, total=total, disable=disabled))


def _line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """The command line of lm_eval; returns the exit code."""
    keep_executables()
    # What the libraries warn of is not for the reader of a progress bar.
    absl.logging.set_verbosity(absl.logging.ERROR)
    try:
        cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # The harness bootstraps in processes of its own; to fork below the threads of JAX may hang.
    multiprocessing.set_start_method("forkserver")
    sys.exit(main())
