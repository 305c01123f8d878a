"""The summary's numbers are those of a hand calculation, and the figures show what the metrics say."""

import json
import math

import matplotlib.image
import numpy as np
import pytest

from depthgrow_jax.report.figures import loss_figure
from depthgrow_jax.report.summary import summarise, write_summary
from depthgrow_jax.rundir import read_json


def result(arm, seed, operator, flops, step_seconds, train, val):
    return {
        "arm": arm,
        "seed": seed,
        "directory": f"{arm}/seed{seed}",
        "operator": operator,
        "steps": 1000,
        "depth": 8,
        "params": 12345,
        "tokens": 2_000_000,
        "flops": flops,
        "seconds": {"compile": 2.0 + seed, "step": step_seconds, "evaluate": 1.0, "save": 0.5, "grow": 0.25},
        "train_loss": train,
        "val_loss": val,
        "val_loss_low": val - 0.1,
        "val_loss_high": val + 0.2,
        "val_sequences": 16,
    }


RESULTS = [
    result("static", 0, "none", 8 * 10**12, 100.0, 3.0, 3.2),
    result("static", 1, "none", 8 * 10**12, 120.0, 3.1, 3.4),
    result("midas", 0, "midas", 6 * 10**12, 80.0, 2.9, 3.1),
    result("midas", 1, "midas", 6 * 10**12, 96.0, 3.3, 3.0),
    {"arm": "wild", "seed": 0, "directory": "wild", "operator": "midas", "diverged": "loss is nan at step 3"},
]


def test_numbers_by_hand():
    static, midas = summarise(RESULTS)
    assert (static["arm"], static["seeds"], static["flops"]) == ("static", [0, 1], 8 * 10**12)
    assert static["saved_flops"] is None and static["saved_seconds"] is None
    assert midas["saved_flops"] == pytest.approx(0.25)
    assert midas["saved_seconds"] == pytest.approx(1 - 88 / 110)
    assert static["seconds"] == {"compile": 2.5, "step": 110.0, "evaluate": 1.0, "save": 0.5, "grow": 0.25}
    assert midas["train_loss"] == [2.9, 3.3] and midas["val_interval"][1] == [2.9, 3.2]


def test_no_baseline_no_savings():
    (row,) = summarise(RESULTS[2:4])
    assert row["saved_flops"] is None and row["saved_seconds"] is None


def write_metrics(root, arm, seed, depths):
    directory = root / arm / f"seed{seed}"
    directory.mkdir(parents=True)
    lines = []
    for step in range(1, 41):
        loss = 4 - step / 20 + 0.1 * seed
        depth = depths[min(len(depths) - 1, step * len(depths) // 41)]
        lines.append({"step": step, "loss": loss, "flops": step * depth, "depth": depth, "tokens": step})
        if step % 10 == 0:
            lines.append({"step": step, "val_loss": loss + 0.2})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_page_and_files(tmp_path):
    for seed in (0, 1):
        write_metrics(tmp_path, "static", seed, [8])
        write_metrics(tmp_path, "midas", seed, [2, 4, 8])
    text = write_summary(tmp_path, RESULTS)
    assert (tmp_path / "summary.md").read_text() == text
    head, _, static, midas, *_ = text.splitlines()
    cells = lambda line: [cell.strip() for cell in line.strip("|").split("|")]  # noqa: E731
    row = dict(zip(cells(head), cells(midas), strict=True))
    assert row == {
        "arm": "midas",
        "depth": "8",
        "steps": "1,000",
        "tokens": "2,000,000",
        "TFLOPs": "6.000",
        "compile s": "2.5",
        "step s": "88.0",
        "FLOPs saved": "25.0%",
        "step s saved": "20.0%",
        # Sample standard deviations: |3.3 - 2.9| / sqrt(2) and 0.1 / sqrt(2).
        "train loss": f"3.1000 ± {0.4 / math.sqrt(2):.4f}",
        "val loss": f"3.0500 ± {0.1 / math.sqrt(2):.4f}",
        "95% interval": "-",
    }
    assert cells(static)[7:9] == ["-", "-"]
    assert "- wild diverged: loss is nan at step 3" in text
    stored = read_json(tmp_path / "summary.json")
    assert stored["runs"] == RESULTS and [row["arm"] for row in stored["arms"]] == ["static", "midas"]
    for name in ("loss_vs_flops.png", "loss_vs_steps.png"):
        assert distinct_colours(tmp_path / name) > 100
    assert (tmp_path / "loss_vs_flops.png").read_bytes() != (tmp_path / "loss_vs_steps.png").read_bytes()


def test_one_seed_shows_its_interval(tmp_path):
    (tmp_path / "static" / "seed0").mkdir(parents=True)
    text = write_summary(tmp_path, RESULTS[:1])
    assert "| 3.2000 | 3.1000 - 3.4000 |" in text and "±" not in text.splitlines()[2]


def test_nothing_finished_still_writes_a_page(tmp_path):
    text = write_summary(tmp_path, RESULTS[-1:])
    assert "wild diverged" in text and read_json(tmp_path / "summary.json")["arms"] == []
    assert (tmp_path / "loss_vs_steps.png").exists()


def distinct_colours(path) -> int:
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[0] > 400 and pixels.shape[1] > 600
    return len(np.unique((pixels.reshape(-1, pixels.shape[-1]) * 255).astype(np.uint8), axis=0))


def test_figure_draws_every_arm_in_its_colour(tmp_path):
    line = lambda step, loss, depth: {"step": step, "flops": step * depth, "loss": loss, "depth": depth}  # noqa: E731
    curve = lambda offset: [line(step, 3 - step / 30 + offset, 1 + step // 20) for step in range(1, 41)]  # noqa: E731
    loss_figure({"a": [curve(0.0)], "b": [curve(0.3)]}, tmp_path / "two.png", x="flops")
    loss_figure({"a": [curve(0.0)]}, tmp_path / "one.png", x="flops")

    def has(path, colour):
        pixels = matplotlib.image.imread(path)[..., :3]
        # The lines are drawn at alpha 0.75 over white.
        wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255 * 0.75 + 0.25
        return (np.abs(pixels - wanted).max(axis=-1) < 0.03).sum() > 50

    assert has(tmp_path / "two.png", "#0072B2") and has(tmp_path / "two.png", "#D55E00")
    assert has(tmp_path / "one.png", "#0072B2") and not has(tmp_path / "one.png", "#D55E00")
