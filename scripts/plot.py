#!/usr/bin/python3
"""Draws logs of train_gpt (--log FILE, JSON Lines): loss, learning rate, gradient norm and tokens/s, of one or several runs.

    scripts/plot.py out/run.jsonl                     -> out/run.png
    scripts/plot.py p1.jsonl p0.5.jsonl --out both.png --x seconds
    scripts/plot.py out/run.jsonl --insight           adds what --insight-every recorded

Needs Debian's python3-matplotlib, hence the Python named above.
"""
import argparse
import json
import math
import os
import sys

try:
    import matplotlib
except ImportError:
    sys.exit(f"plot.py: {sys.executable} has no matplotlib\nHINT: scripts/install.sh demo, then run this file itself: scripts/plot.py LOG")
matplotlib.use("Agg")  # a picture file, no window
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter  # noqa: E402

# Told apart by colour-blind people too (Okabe and Ito).
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555"]
INK, GRID = "#333333", "#E3E3E3"
X_LABELS = {"step": "step", "tokens": "tokens trained on", "seconds": "seconds of training (without validation and saving)"}


def number(value):
    """A record's value as a float; null, and whatever is no number, becomes nan: a gap in the curve."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else math.nan


class Run:
    """One log. A resumed run appends to it: its first step takes back what an earlier process did from there on."""

    def __init__(self, path):
        self.path = path
        self.flags = {}
        records = {"step": {}, "val": {}, "insight": {}}
        resumed = False
        for record in self.read(path):
            kind, step = record.get("kind"), record.get("step")
            if kind == "run":
                self.flags = record["flags"] if isinstance(record.get("flags"), dict) else {}
                resumed = True
            if kind not in records or not isinstance(step, int) or isinstance(step, bool):
                continue
            if kind == "step" and resumed:
                for found in records.values():
                    for old in [s for s in found if s >= step]:
                        del found[old]
                resumed = False
            records[kind][step] = record
        if not records["step"] and not records["val"]:
            sys.exit(f"plot.py: '{path}' holds no step and no validation: is it what train_gpt --log wrote, and has the first step ended?")

        steps = sorted(records["step"])
        column = lambda name: np.array([number(records["step"][s].get(name)) for s in steps])
        self.steps = np.array(steps, dtype=float)
        self.loss, self.lr, self.norm, self.rate = map(column, ("loss", "lr", "grad_norm", "tokens_per_second"))
        self.skipped = np.array([records["step"][s].get("skipped") is True for s in steps], dtype=bool)
        self.x = {"step": self.steps, "tokens": column("tokens"), "seconds": np.nancumsum(column("seconds"))}
        self.val_steps = np.array(sorted(records["val"]), dtype=float)
        self.val = np.array([number(records["val"][int(s)].get("loss")) for s in self.val_steps])
        self.insight = [records["insight"][s] for s in sorted(records["insight"])]

    @staticmethod
    def read(path):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                lines = file.read().split("\n")
        except OSError as error:
            sys.exit(f"plot.py: cannot read '{path}': {error.strerror}")
        broken = []
        for at, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                yield record
            else:
                broken.append(at)
        if broken:
            where = f"line {broken[0]}" + (f" and {len(broken) - 1} more" if len(broken) > 1 else "")
            why = "the last one, cut while it was written" if broken == [len(lines)] else "not JSON records"
            print(f"plot.py: note: '{path}': left out {where} ({why})", file=sys.stderr)

    def at(self, steps, x):
        """Where steps (of validations: between two training steps) lie on the x axis."""
        if x == "step" or self.steps.size == 0:
            return np.asarray(steps, dtype=float)
        at = np.isfinite(self.x[x])
        return np.interp(steps, np.concatenate([[0], self.steps[at]]), np.concatenate([[0], self.x[x][at]]))

    def setting(self):
        """T, p, D, as far as the log says."""
        parts = [f"{name}={self.flags[key]:g}" for key, name in (("tp", "T"), ("sync_factor", "p"), ("dp", "D"))
                 if isinstance(self.flags.get(key), (int, float)) and not (key == "dp" and self.flags[key] <= 1)]
        return ", ".join(parts)


def short_names(paths):
    """The file names without their ending; with as many folders before them as it takes to tell them apart."""
    parts = [os.path.splitext(os.path.abspath(path))[0].split(os.sep) for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = [os.sep.join(p[-depth:]) for p in parts]
        if len(set(names)) == len(set(map(os.path.abspath, paths))):
            break
    return names


def smoothed(values, window):
    """Mean over a centred window (narrower at the start, where a loss falls fast; cut at the end), skipping gaps and leaving them in place."""
    if values.size == 0:
        return values
    measured = np.isfinite(values)
    sums = np.concatenate([[0], np.cumsum(np.where(measured, values, 0))])
    counts = np.concatenate([[0], np.cumsum(measured)])
    at = np.arange(values.size)
    half = np.minimum(at, window // 2)
    begin, end = at - half, np.minimum(at + half + 1, values.size)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(measured, (sums[end] - sums[begin]) / (counts[end] - counts[begin]), np.nan)


def human(value, _=None):
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def finish(panel, title, x):
    panel.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    panel.set_xlabel(X_LABELS[x], color=INK)
    panel.grid(True, color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(which="both", colors=INK, length=0)
    panel.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=x != "seconds"))
    if x != "seconds":
        panel.xaxis.set_major_formatter(FuncFormatter(human))
    for side, spine in panel.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#AAAAAA")


def known(curves):
    """All values of the curves but the gaps."""
    return np.concatenate([c[np.isfinite(c)] for c in curves])


def log_axis(panel, values):
    panel.set_yscale("log")
    if values.max() < 30 * values.min():  # powers of ten alone would be too few
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(human))
    panel.yaxis.set_minor_formatter(NullFormatter())


def draw_lines(panel, runs, x, pick, window):
    """A faint line of what was measured and a full one of its mean; alone if the mean is the same."""
    for run, color in zip(runs, COLORS * len(runs)):
        values = pick(run)
        w = window(values)
        dots = {"marker": ".", "markersize": 5} if np.isfinite(values).sum() <= 3 else {}
        if w > 1:
            panel.plot(run.x[x], values, color=color, alpha=0.25, linewidth=0.9, **dots)
        panel.plot(run.x[x], smoothed(values, w), color=color, linewidth=1.8, **dots)


def draw_insight(figure, row, runs, names, x):
    for i, (run, name) in enumerate(zip(runs, names)):
        for panel, key, title in ((row[i][0], "layer_grad_norm", "Gradient norm by layer"),
                                  (row[i][1], "layer_private_divergence", "Private channels: distance between ranks by layer")):
            title += f" ({name})" if len(runs) > 1 else ""
            curves = [r.get(key) if isinstance(r.get(key), list) else [] for r in run.insight]
            layers = max(map(len, curves), default=0)
            table = np.array([[number(v) for v in c] + [math.nan] * (layers - len(c)) for c in curves])
            at = run.at([r["step"] for r in run.insight], x)
            if layers == 0 or not np.isfinite(table).any():
                panel.text(0.5, 0.5, "no insight records (--insight-every)", ha="center", va="center", transform=panel.transAxes, color=INK)
                finish(panel, title, x)
                continue
            shades = plt.get_cmap("viridis")(np.linspace(0, 0.92, layers))
            for layer in range(layers):
                panel.plot(at, table[:, layer], color=shades[layer], linewidth=1.5, marker="." if len(at) <= 30 else None)
            if key == "layer_grad_norm" and np.nanmin(table) > 0:
                log_axis(panel, known([table]))
            else:
                panel.set_ylim(bottom=0)
            scale = plt.cm.ScalarMappable(matplotlib.colors.BoundaryNorm(np.arange(layers + 1) - 0.5, layers),
                                          matplotlib.colors.ListedColormap(shades))
            bar = figure.colorbar(scale, ax=panel, pad=0.01, aspect=30, ticks=MaxNLocator(nbins=min(8, layers), integer=True))
            bar.set_label("layer", color=INK)
            bar.outline.set_visible(False)
            bar.ax.tick_params(colors=INK, length=0)
            finish(panel, title, x)


def draw(runs, names, x, references, insight, title):
    rows = 2 + (len(runs) if insight else 0)
    plt.rcParams.update({"font.size": 9.5, "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK, "agg.path.chunksize": 10000})
    figure, panels = plt.subplots(rows, 2, figsize=(12.5, 3.9 * rows), squeeze=False, constrained_layout=True)
    (loss, lr), (norm, rate) = panels[0], panels[1]
    colors = COLORS * len(runs)
    # Of a long run about a fiftieth; of a short one nothing, so that no step is hidden.
    window = lambda values: 2 * (values.size // 100) + 1

    # Loss
    draw_lines(loss, runs, x, lambda r: r.loss, window)
    for run, color in zip(runs, colors):
        if run.val.size:
            loss.plot(run.at(run.val_steps, x), run.val, "o", color=color, markersize=5.5, markeredgecolor="white", markeredgewidth=1.0, zorder=5)
    losses, validations = [r.loss for r in runs], [r.val for r in runs]
    if (values := known(losses + validations)).size:
        # The first losses and all but the rarest spikes are in the picture: a single spike must not flatten the rest.
        shown = [values.min(), np.quantile(values, 0.999), *known([c[:10] for c in losses]), *known(validations), *(v for v, _ in references)]
        margin = 0.05 * (max(shown) - min(shown)) or 0.1
        loss.set_ylim(min(shown) - margin, max(shown) + margin)
    for value, label in references:
        loss.axhline(value, color=INK, linestyle=(0, (4, 3)), linewidth=1.1, zorder=1)
        loss.annotate(f"{label}: {value:.2f}", (1, value), xycoords=("axes fraction", "data"), xytext=(-2, 3), textcoords="offset points", ha="right", color=INK)
    handles = []
    for run, name, color in zip(runs, names, colors):
        text = name + (f" ({run.setting()})" if run.setting() else "")
        handles.append(plt.Line2D([], [], color=color, linewidth=2, label=text if len(runs) > 1 else "training"))
        if run.val.size and len(runs) == 1:
            last = np.flatnonzero(np.isfinite(run.val))
            label = "validation" + (f", {run.val[last[-1]]:.3f} at the end" if last.size else "")
            handles.append(plt.Line2D([], [], color=color, marker="o", markeredgecolor="white", linestyle="", markersize=6.5, label=label))
    if len(runs) > 1 and any(r.val.size for r in runs):
        handles.append(plt.Line2D([], [], color="#777777", marker="o", linestyle="", markersize=5, label="validation"))
    loss.legend(handles=handles, frameon=False, loc="upper right")
    finish(loss, "Loss (nats per token)", x)

    # Learning rate
    draw_lines(lr, runs, x, lambda r: r.lr, lambda values: 1)
    lr.set_ylim(bottom=0)
    lr.yaxis.set_major_formatter(FuncFormatter(human))
    finish(lr, "Learning rate", x)

    # Gradient norm
    draw_lines(norm, runs, x, lambda r: r.norm, window)
    for run in runs:
        norm.plot(run.x[x][run.skipped], run.norm[run.skipped], "x", color="black", markersize=6, zorder=5)
    if any(run.skipped.any() for run in runs):
        norm.legend(handles=[plt.Line2D([], [], color="black", marker="x", linestyle="", label="update skipped")], frameon=False, loc="upper right")
    norms = known([r.norm for r in runs])
    if norms.size and norms.min() > 0:
        log_axis(norm, norms)
        clips = {number(r.flags.get("clip")) for r in runs}
        if len(clips) == 1 and norms.min() / 3 < (clip := clips.pop()) < norms.max() * 3:
            norm.axhline(clip, color=INK, linestyle=(0, (4, 3)), linewidth=1.1, zorder=1)
            norm.annotate(f"clipped above {clip:g}", (1, clip), xycoords=("axes fraction", "data"), xytext=(-2, 3), textcoords="offset points", ha="right", color=INK)
    finish(norm, "Gradient norm (before clipping)", x)

    # Speed
    draw_lines(rate, runs, x, lambda r: r.rate, window)
    if (rates := known([r.rate for r in runs])).size:
        rate.set_ylim(0, 1.12 * np.quantile(rates, 0.995) or 1)
    rate.yaxis.set_major_formatter(FuncFormatter(human))
    finish(rate, "Tokens per second", x)

    if insight:
        draw_insight(figure, panels[2:], runs, names, x)
    if title is None:
        model = runs[0].flags.get("model")
        title = names[0] + "".join(f", {t}" for t in (model, runs[0].setting()) if isinstance(t, str) and t) if len(runs) == 1 else ""
    if title:
        figure.suptitle(title, fontsize=12.5, x=0.01, ha="left", color=INK)
    return figure


def reference(text):
    value, _, label = text.partition("=")
    try:
        return float(value), label or "reference"
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}': wanted NUMBER=LABEL, such as 5.91=unigram")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", metavar="LOG", nargs="+", help="what train_gpt --log wrote; a resumed run's log is one run")
    parser.add_argument("--out", metavar="FILE.png", help="the picture (.png, .svg, .pdf); else the first log's name with .png")
    parser.add_argument("--x", choices=X_LABELS, default="step", help="horizontal axis (%(default)s)")
    parser.add_argument("--reference", type=reference, action="append", default=[], metavar="NUMBER=LABEL", help="a dashed line in the loss panel")
    parser.add_argument("--insight", action="store_true", help="add gradient norm and private-channel divergence by layer, two panels a run")
    parser.add_argument("--title", help="above the panels")
    options = parser.parse_args(arguments)

    out = options.out or os.path.splitext(options.logs[0])[0] + ".png"
    if any(os.path.exists(out) and os.path.exists(log) and os.path.samefile(out, log) for log in options.logs):
        parser.error(f"--out '{out}' would replace a log")
    runs = [Run(path) for path in options.logs]
    insight = options.insight and any(run.insight for run in runs)
    if options.insight and not insight:
        print("plot.py: note: no insight records in there (train_gpt --insight-every N writes them)", file=sys.stderr)
    figure = draw(runs, short_names(options.logs), options.x, options.reference, insight, options.title)
    aside = f"{out}.tmp"
    try:
        os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
        figure.savefig(aside, dpi=130, format=os.path.splitext(out)[1][1:] or "png", facecolor="white")
        os.replace(aside, out)
    except (OSError, ValueError) as error:
        if os.path.exists(aside):
            os.remove(aside)
        sys.exit(f"plot.py: cannot write '{out}': {getattr(error, 'strerror', None) or error}")
    print(os.path.abspath(out))


if __name__ == "__main__":
    main()
