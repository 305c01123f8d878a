"""One schema: ConfigDict, dataclasses and JSON agree; every field is documented; arms merge as written."""

import dataclasses
import json
import re

import ml_collections
import pytest

from depthgrow_jax import config as schema
from depthgrow_jax.config import (
    RunConfig,
    base_config,
    binding_fields,
    config_hash,
    flatten,
    from_dict,
    parse,
    to_dict,
    validate,
)
from depthgrow_jax.data import DataConfig, SourceConfig
from depthgrow_jax.errors import UserError
from depthgrow_jax.growth import GrowthConfig
from depthgrow_jax.model import PRESETS, ModelConfig
from depthgrow_jax.train import config as train_config

SECTIONS = [
    RunConfig,
    ModelConfig,
    GrowthConfig,
    SourceConfig,
    DataConfig,
    *(value for value in vars(train_config).values() if dataclasses.is_dataclass(value)),
]

FULL = RunConfig(
    name="full",
    depth=5,
    seed=7,
    model=ModelConfig(width=64, tie_embeddings=False),
    growth=GrowthConfig(
        operator="explicit",
        sources=((0, 0, 1), (0, 1, 1, 2, 2)),
        schedule="explicit",
        boundaries=(10, 20),
    ),
    data=DataConfig(
        mixture=(("a", SourceConfig(source="files", path="x.txt")), ("b", SourceConfig(weight=2.0)))
    ),
)


def test_base_config_is_the_default_run():
    experiment = parse(base_config())
    assert experiment.runs == {("", 0): RunConfig()} and not experiment.named


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset):
    (run,) = parse(base_config(preset)).runs.values()
    assert (run.depth, run.name) == (PRESETS[preset][0], preset) and run.model.vocab_size == 49152


@pytest.mark.parametrize("cfg", [RunConfig(), FULL], ids=["default", "full"])
def test_round_trips(cfg):
    """Through nested dicts, through JSON (whose lists were tuples), and through a ConfigDict."""
    assert from_dict(RunConfig, to_dict(cfg)) == cfg
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(cfg)))) == cfg
    through = ml_collections.ConfigDict(to_dict(cfg)).to_dict()
    assert from_dict(RunConfig, through) == cfg
    # Through JSON once more: what `config.json` holds decides whether a run may go on.
    again = from_dict(RunConfig, json.loads(json.dumps(to_dict(cfg))))
    assert binding_fields(again) == binding_fields(cfg) and config_hash(again) == config_hash(cfg)


def test_integers_are_taken_for_floats_and_nothing_else_is():
    cfg = from_dict(RunConfig, {"optimizer": {"learning_rate": 1}})
    assert cfg.optimizer.learning_rate == 1.0 and type(cfg.optimizer.learning_rate) is float
    for fields, message in [
        ({"depth": 2.0}, r"depth=2.0: must be of type int, not float"),
        ({"depth": True}, r"depth=True: must be of type int, not bool"),
        ({"optimizer": {"learning_rate": True}}, r"learning_rate=True: must be of type float"),
        ({"model": {"causal": 1}}, r"model.causal=1: must be of type bool"),
        ({"name": 3}, r"name=3: must be of type str"),
        ({"name": None}, r"name=None: must be of type str"),
        ({"name": "None"}, r"name='None': is the word None"),
        ({"model": 3}, r"model=3: must be a group of fields"),
        ({"growth": {"boundaries": 3}}, r"growth.boundaries=3: must be a tuple"),
        ({"growth": {"boundaries": (1, 2.5)}}, r"growth.boundaries\[1\]=2.5: must be of type int"),
        ({"growth": {"sources": ((0, "x"),)}}, r"growth.sources\[0\]\[1\]='x': must be of type int"),
        ({"data": {"mixture": (1,)}}, r"data.mixture=\(1,\): must map names"),
        (
            {"data": {"mixture": {"a": {"pth": "x"}}}},
            r"data.mixture.a.pth: unknown field; legal: source, path",
        ),
        ({"model": {"widht": 3}}, r"model.widht: unknown field; legal: vocab_size, width"),
        ({"optimizer": {"eps": float("inf")}}, r"optimizer.eps=inf: must be a finite number"),
    ]:
        with pytest.raises(UserError, match=message):
            from_dict(RunConfig, fields)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_field_is_documented(section):
    """The `Attributes:` of a section name its fields; groups are documented by their own class."""
    text = section.__doc__
    assert "Attributes:" in text
    described = set()
    for names in re.findall(r"^ +(\w+(?:, \w+)*):", text.split("Attributes:")[1], re.MULTILINE):
        described |= {name.strip() for name in names.split(",")}
    inherited = {
        f.name
        for base in section.__bases__
        if dataclasses.is_dataclass(base)
        for f in dataclasses.fields(base)
    }
    own = {f.name for f in dataclasses.fields(section) if not dataclasses.is_dataclass(f.default)} - inherited
    # `rope_scaling` speaks for its parameters.
    own -= {name for name in own if name.startswith("rope_") and name not in ("rope_theta", "rope_scaling")}
    assert own <= described, own - described
    assert described <= own, described - own


INVALID = {
    "depth": (0, "depth=0: must be at least 1"),
    "train.steps": (0, "train.steps=0: must be at least 1"),
    "train.batch_size": (0, "train.batch_size=0"),
    "train.sequence_length": (1, "train.sequence_length=1: must be at least 2"),
    "train.accumulation": (3, "train.accumulation=3: must divide train.batch_size=16"),
    "train.log_every": (0, "train.log_every=0"),
    "train.eval_every": (-1, "train.eval_every=-1"),
    "train.eval_batches": (0, "train.eval_batches=0"),
    "train.mask_rate": (1.0, "train.mask_rate=1.0: must lie between 0 and 1"),
    "train.z_loss": (-1.0, "train.z_loss=-1.0"),
    "train.ema_decay": (1.0, r"train.ema_decay=1.0: must lie in \[0, 1\)"),
    "train.objective": ("both", "train.objective='both': must be one of causal, masked"),
    "optimizer.name": ("adam", "optimizer.name='adam': must be one of adamw, lion, muon"),
    "optimizer.schedule": ("step", "optimizer.schedule='step': must be one of wsd, cosine"),
    "optimizer.learning_rate": (0.0, "optimizer.learning_rate=0.0: must be above 0"),
    "optimizer.warmup_steps": (1001, r"optimizer.warmup_steps=1001: must lie in \[0, train.steps=1000\]"),
    "optimizer.decay_steps": (-1, "optimizer.decay_steps=-1"),
    "optimizer.b1": (1.0, "optimizer.b1=1.0"),
    "optimizer.b2": (-0.1, "optimizer.b2=-0.1"),
    "optimizer.final_fraction": (1.5, r"optimizer.final_fraction=1.5: must lie in \[0, 1\]"),
    "optimizer.eps": (0.0, "optimizer.eps=0.0"),
    "optimizer.weight_decay": (-1.0, "optimizer.weight_decay=-1.0"),
    "optimizer.clip_norm": (-1.0, "optimizer.clip_norm=-1.0"),
    "checkpoint.every": (-1, "checkpoint.every=-1"),
    "checkpoint.keep": (0, "checkpoint.keep=0"),
    "mesh.data": (-1, "mesh.data=-1"),
    "mesh.fsdp": (0, "mesh.fsdp=0"),
    "init_from.what": ("some", "init_from.what='some': must be one of params, all"),
    "init_from.step": (-1, "init_from.step=-1"),
    "model.causal": (False, "model.causal=False: train.objective='causal' needs model.causal=True"),
    "model.norm": ("batch", "model.norm='batch': must be one of"),
    "growth.operator": ("up", "growth.operator='up': must be one of none, midas"),
    "data.source": ("web", "data.source='web': must be one of"),
    "seeds": ((-1,), r"seeds=-1: must lie in \[0, 2"),
}


@pytest.mark.parametrize("field", INVALID)
def test_what_cannot_run_is_refused_by_name(field):
    value, message = INVALID[field]
    config = base_config()
    with config.unlocked():
        config.update_from_flattened_dict({field: value})
    with pytest.raises(UserError, match=message):
        parse(config)


def test_warmup_and_decay_must_fit_together():
    config = base_config()
    config.optimizer.update(warmup_steps=600, decay_steps=600)
    with pytest.raises(UserError, match=r"optimizer.decay_steps=600: warm-up \(600\) and decay must fit"):
        parse(config)


def test_arms_merge_deeply_and_mixtures_are_replaced():
    config = base_config()
    with config.unlocked():
        config.data.mixture = {"one": {"weight": 2.0}}
    config.growth.block_size = 2
    config.arms = {
        "static": {},
        "midas": {"growth": {"operator": "midas"}, "optimizer": {"learning_rate": 0.5}, "depth": 4},
        "other": {"data": {"mixture": {"two": {"source": "files", "path": "x"}}}},
    }
    runs = parse(config).runs
    assert list(runs) == [("other", 0), ("static", 0), ("midas", 0)]  # what does not grow comes first
    static, midas = runs["static", 0], runs["midas", 0]
    assert (
        midas.growth == dataclasses.replace(static.growth, operator="midas") and midas.growth.block_size == 2
    )
    assert midas.optimizer == dataclasses.replace(static.optimizer, learning_rate=0.5)
    assert (static.depth, midas.depth) == (8, 4)
    assert [name for name, _ in runs["other", 0].data.mixture] == ["two"]
    assert [name for name, _ in static.data.mixture] == ["one"]


def test_a_faulty_arm_is_named():
    config = base_config()
    config.arms = {"good": {}, "bad": {"optimizer": {"lr": 1.0}}}
    with pytest.raises(UserError, match=r"arms.bad.optimizer.lr: unknown field; legal: "):
        parse(config)
    config.arms = {"good": {}, "worse": {"depth": 0}}
    with pytest.raises(UserError, match=r"depth=0: must be at least 1 \(in arm 'worse'\)"):
        parse(config)


def test_seeds_multiply_arms():
    config = base_config()
    config.seeds = (3, 1)
    experiment = parse(config)
    assert experiment.named and [run.seed for run in experiment.runs.values()] == [3, 1]
    config.arms = {"a": {}, "b": {"growth": {"operator": "midas", "block_size": 2}}}
    assert list(parse(config).runs) == [("a", 3), ("a", 1), ("b", 3), ("b", 1)]
    for seeds, message in [((), "must be a tuple"), ((2, 2), "must not repeat")]:
        config.seeds = seeds
        with pytest.raises(UserError, match=message):
            parse(config)


def test_base_config_is_locked():
    with pytest.raises(AttributeError, match="lr"):
        base_config().optimizer.lr = 1.0


def test_binding_fields_are_all_but_the_free_ones():
    fields = binding_fields(FULL)
    everything = set(flatten(json.loads(json.dumps(to_dict(FULL)))))
    free = everything - set(fields)
    assert free == {
        *("name", "checkpoint.every", "checkpoint.keep", "mesh.data", "mesh.fsdp", "data.cache_dir"),
        *("train.log_every", "train.eval_every", "train.eval_batches", "model.scan_unroll", "model.remat"),
    }
    assert set(schema.FREE_FIELDS) <= {name for f in free for name in (f, f.split(".")[0])}


def test_hash_follows_binding_fields_only():
    def changed(**sections):
        parts = {k: dataclasses.replace(getattr(FULL, k), **v) for k, v in sections.items()}
        return config_hash(dataclasses.replace(FULL, **parts))

    assert re.fullmatch("[0-9a-f]{12}", config_hash(FULL))
    assert changed(mesh={"data": 4}, train={"log_every": 3}) == config_hash(FULL)
    assert changed(train={"steps": 999}) != config_hash(FULL)
    assert config_hash(dataclasses.replace(FULL, seed=8)) != config_hash(FULL)


def test_validate_returns_the_stages():
    stages = validate(dataclasses.replace(FULL, data=DataConfig()))
    assert [(s.depth, s.first, s.stop) for s in stages] == [(2, 0, 10), (3, 10, 20), (5, 20, 1000)]
