# SPDX-License-Identifier: Apache-2.0
"""PNG pictures of plans. Needs matplotlib: pip install 'qlorapp[plot]'."""

import os

GIB, MIB = 1 << 30, 1 << 20


def draw_timeline(
    path: str | os.PathLike[str],
    title: str,
    planned: list[tuple[str, dict[str, int]]],
    measured: list[tuple[float, int]],
    budget: int | None,
    *,
    dpi: int,
) -> None:
    """planned: (phase, bytes by part) per interval; measured: (position, bytes)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "[plan] a PNG needs matplotlib. Install it (pip install 'qlorapp[plot]'), or write the SVG: plan.svg(path)."
        ) from error
    top = max([sum(parts.values()) for _, parts in planned] + [size for _, size in measured] + [budget or 0])
    unit, name = (GIB, "GiB") if top >= GIB else (MIB, "MiB")
    # A separate figure, so a notebook's state and a program's backend do not change.
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    edges = range(len(planned) + 1)
    uses = [use for use in _in_order(planned) if any(parts[use] for _, parts in planned)]
    heights = [[parts[use] / unit for _, parts in planned] for use in uses]
    axes.stackplot(edges, [[*row, row[-1]] for row in heights], step="post", labels=uses, colors=_colors(len(uses)))
    for i, (phase, _) in enumerate(planned):
        if i == 0 or planned[i - 1][0] != phase:
            axes.axvline(i, color="0.4", linewidth=0.8, linestyle=":")
            length = sum(1 for other, _ in planned if other == phase)
            if length > len(planned) / 30:
                axes.text(
                    i + length / 2, 1.0, phase, transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=8
                )
    if measured:
        peak = max(size for _, size in measured) / unit
        label = f"measured, {peak:.1f} {name} at most"
        axes.plot([at for at, _ in measured], [size / unit for _, size in measured], color="black", linewidth=1.2, label=label)
    if budget is not None:
        axes.axhline(budget / unit, color="tab:red", label=f"budget {budget / unit:.1f} {name}")
    axes.set(xlim=(0, len(planned)), ylim=(0, 1.04 * top / unit), ylabel=name, xticks=[])
    axes.set_title(title, fontsize=10, pad=16)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(os.fspath(path), dpi=dpi, format="png")


def _in_order(planned: list[tuple[str, dict[str, int]]]) -> list[str]:
    """The parts, the most constant first."""
    sizes = {use: [parts[use] for _, parts in planned] for use in planned[0][1]}
    return sorted(sizes, key=lambda use: (max(sizes[use]) - min(sizes[use]), -max(sizes[use])))


def _colors(count: int) -> list[tuple[float, float, float, float]]:
    from matplotlib import colormaps

    return [colormaps["tab20"](i % 20) for i in range(count)]
