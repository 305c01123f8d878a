"""Results written are results read, to the bit; damage and kills never give wrong numbers."""

import json
import os

import numpy as np
import pytest

from depthgrow_jax import results
from depthgrow_jax.errors import UserError
from depthgrow_jax.probes.result import (
    Axis,
    Quantity,
    Result,
    Score,
    constant,
    layer_axis,
    quantity,
    token_quantity,
)

NAN = float("nan")


def example(probe: str = "ablation") -> Result:
    rng = np.random.default_rng(0)
    statistics = np.sort(rng.normal(size=(4, 3, 5)).astype(np.float32), axis=0)
    by_layer = token_quantity(("layer",), "nats", statistics, np.array([2.0, 3.0, 4.0]), noise_floor=1e-7)
    single = quantity(("layer",), "", {"mean": rng.normal(size=(1, 5))})
    return Result(
        probe=probe,
        steps=5,
        axes={"layer": layer_axis(5), "part": Axis(np.array(["attention", "mlp"]))},
        quantities={
            "current.layer.kl": by_layer,
            # One example: its interval is NaN.
            "single": single,
            "share": constant(("part",), "share of layers", np.array([0.1, 1 / 3])),
            "count": constant((), "", np.int64(7)),
        },
        conventions={"kl": "KL(p || q), «nats»"},
        examples=3,
        tokens=9,
        scores={"depth": Score(1 / 3, 0.1, NAN, 0.5, NAN, NAN, "a formula")},
        notes={"splits": [[1, 2], [3]], "nothing": None, "p": 0.1},
        arrays={"translator.kernel": rng.normal(size=(2, 3, 3)).astype(np.float32)},
    )


def same_bits(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_round_trip(tmp_path):
    original, header = example(), {"run": "static/seed0", "seconds": 0.1, "lineage": [[0, 1]]}
    path = results.save(tmp_path, original, header)
    assert path == tmp_path / "ablation.json"
    loaded, stored_header = results.load(path)
    assert stored_header == header
    for field in ("probe", "steps", "conventions", "examples", "tokens", "notes"):
        assert getattr(loaded, field) == getattr(original, field), field
    assert list(loaded.quantities) == list(original.quantities)
    for name, q in original.quantities.items():
        other = loaded.quantities[name]
        assert isinstance(other, Quantity)
        assert (other.axes, other.unit, other.noise_floor) == (q.axes, q.unit, q.noise_floor)
        assert (other.weights is None) == (q.weights is None)
        assert q.weights is None or same_bits(other.weights, q.weights)
        for mine, theirs in ((q.statistics, other.statistics), (q.by_example, other.by_example)):
            assert list(mine) == list(theirs)
            assert all(same_bits(mine[key], theirs[key]) for key in mine), name
    assert loaded.axes["part"].normalised is None
    assert same_bits(loaded.axes["part"].values, original.axes["part"].values)
    assert same_bits(loaded.axes["layer"].normalised, original.axes["layer"].normalised)
    assert same_bits(loaded.arrays["translator.kernel"], original.arrays["translator.kernel"])
    np.testing.assert_array_equal(loaded.scores["depth"][:6], original.scores["depth"][:6])
    assert loaded.scores["depth"].definition == "a formula" and np.isnan(loaded.scores["depth"].null_low)


def test_files_are_what_they_are_documented_to_be(tmp_path):
    """Strict JSON (NaN as null), and arrays under readable keys, without pickles."""
    path = results.save(tmp_path, example(), {"x": NAN})

    def refuse(constant):
        raise AssertionError(constant)

    described = json.loads(path.read_text(), parse_constant=refuse)
    assert described["header"] == {"x": None} and described["scores"]["depth"]["high"] is None
    assert described["quantities"]["current.layer.kl"]["axes"] == ["layer"]
    with np.load(tmp_path / "ablation.npz", allow_pickle=False) as stored:
        keys = {
            "current.layer.kl/mean_of_max_high",
            "current.layer.kl/by_example/p95",
            "axis/layer",
            "axis/layer/normalised",
            "axis/part",
            "array/translator.kernel",
            "count/mean",
        }
        assert keys < set(stored)
        assert (stored["axis/layer/normalised"] == [0.1, 0.3, 0.5, 0.7, 0.9]).all()
    assert {p.name for p in tmp_path.iterdir()} == {"ablation.json", "ablation.npz"}


def test_damage_is_named(tmp_path):
    path, npz = results.save(tmp_path, example(), {}), tmp_path / "ablation.npz"
    text, content = path.read_text(), npz.read_bytes()
    middle = len(content) // 2

    def refused(pattern):
        with pytest.raises(UserError, match=pattern) as error:
            results.load(path)
        assert "\n" not in str(error.value)

    npz.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    refused(r"ablation.json or its .npz: damaged \(not the arrays that were described\); remove it")
    npz.write_bytes(content[:middle])
    refused(r"ablation.json or its .npz: damaged")
    npz.unlink()
    refused(r"ablation.npz: no such file; it belongs to ablation.json")
    npz.write_bytes(content)
    path.write_text(text.replace('"mean_low"', '"mean_lo"'))
    refused(r"its .npz: damaged .*mean_lo")
    path.write_text(text.replace('"format": 1', '"format": 0'))
    refused(r"ablation.json: is of format 0, this version reads 1")
    path.write_text("[]")
    refused(r"ablation.json: is not the result of a probe")
    path.write_text(text[:99])
    refused(r"ablation.json: cannot be read")
    path.unlink()
    refused(r"ablation.json: no such file")


def test_a_kill_between_the_files_leaves_no_result(tmp_path, monkeypatch):
    """Rewriting a result: after any step of it there is the old one, the new one, or none."""
    path = results.save(tmp_path, example(), {"version": 1})
    replace, calls, kill_at = os.replace, [], 0

    def killed(*args):
        calls.append(args)
        if len(calls) == kill_at:
            raise KeyboardInterrupt
        replace(*args)

    for last in (1, 2):
        kill_at, calls[:] = last, []
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killed)
            with pytest.raises(KeyboardInterrupt):
                results.save(tmp_path, example(), {"version": 2})
        assert not path.exists()
    results.save(tmp_path, example(), {"version": 3})
    assert results.load(path)[1] == {"version": 3}


def test_programming_errors(tmp_path):
    clash = example()._replace(arrays={"x": np.ones(1)})
    clash = clash._replace(quantities={"array": Quantity((), "", {"x": np.ones(1)})})
    with pytest.raises(ValueError, match="clash"):
        results.save(tmp_path, clash, {})
    for values in (np.array([None]), np.ones(2, dtype="V2")):
        odd = example()._replace(arrays={"x": values})
        with pytest.raises(ValueError, match="array/x is of dtype"):
            results.save(tmp_path, odd, {})
    assert not list(tmp_path.iterdir())
