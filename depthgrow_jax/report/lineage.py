"""The picture of growth: every stage as a stack of layers, coloured by where they descend from."""

import pathlib

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from depthgrow_jax.growth import Stage


def ancestors(stages: tuple[Stage, ...]) -> list[list[int]]:
    """For each stage, the layer of the first stage that each layer descends from."""
    rows = [list(range(stages[0].depth))]
    for stage in stages[1:]:
        assert stage.event is not None
        rows.append([rows[-1][i] for i in stage.event.source])
    return rows


def lineage_figure(arms: dict[str, tuple[Stage, ...]], path: pathlib.Path) -> None:
    """Draws the stages of each arm, layer 0 at the bottom, and writes the PNG `path`.

    Colour: ancestor in the first stage. Hatched: inserted by the event that opened the stage. Grey lines
    lead from a layer to the copies made of it. The width of a stage is its share of the steps.
    """
    figure = Figure(figsize=(1 + 4.2 * len(arms), 4.6), dpi=150, layout="constrained")
    for number, (arm, stages) in enumerate(arms.items()):
        axes = figure.add_subplot(1, len(arms), number + 1)
        rows, total = ancestors(stages), stages[-1].stop
        palette = matplotlib.colormaps["viridis"]
        colours = [palette(0.25 + 0.6 * i / max(len(rows[0]) - 1, 1)) for i in rows[0]]
        gap = 0.05
        left = [stage.first / total + gap * i for i, stage in enumerate(stages)]
        for i, stage in enumerate(stages):
            width = max(stage.steps / total, 0.03)
            for layer, ancestor in enumerate(rows[i]):
                new = stage.event is not None and stage.event.new[layer]
                box = Rectangle(
                    (left[i], layer + 0.06),
                    width,
                    0.88,
                    facecolor=colours[ancestor],
                    edgecolor="white" if new else "none",
                    hatch="///" if new else None,
                    linewidth=0.5,
                )
                axes.add_patch(box)
                if stage.event is not None:
                    edge = left[i - 1] + max(stages[i - 1].steps / total, 0.03)
                    heights = (stage.event.source[layer] + 0.5, layer + 0.5)
                    axes.plot((edge, left[i]), heights, color="0.6", linewidth=0.7)
            axes.text(left[i] + width / 2, stage.depth + 0.15, str(stage.depth), ha="center", fontsize=8)
        axes.set_xlim(-0.02, left[-1] + stages[-1].steps / total + 0.02)
        axes.set_ylim(0, stages[-1].depth + 1)
        depth = stages[-1].depth
        labelled = range(0, depth, -(-depth // 12))
        axes.set_yticks([layer + 0.5 for layer in labelled], [str(layer) for layer in labelled])
        axes.tick_params(length=0)
        axes.set_title(arm)
        axes.set_xticks([])
        axes.set_xlabel("training steps")
        axes.set_ylabel("layer" if number == 0 else "")
        axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    inserted = Patch(facecolor="0.5", edgecolor="white", hatch="///", label="inserted at this event")
    figure.legend(
        handles=[inserted],
        loc="outside lower center",
        frameon=False,
        title="colour: layer of the first stage",
        ncols=2,
    )
    figure.savefig(path)
