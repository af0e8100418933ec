"""The style of all figures in these notebooks."""

import io

import matplotlib.pyplot as plt
from cycler import cycler
from IPython.display import Image as Shown
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

INK = "#22303c"
GREY = "#c9d1d8"
PALE = "#f1f4f6"
BLUE = "#2a6fb0"
ORANGE = "#d9822b"
GREEN = "#3a8f5c"
RED = "#c0392b"
PURPLE = "#7a5aa6"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, INK)


def use_style() -> None:
    """Set matplotlib's defaults; call it once, before the first figure."""
    plt.rcParams.update(
        {
            "figure.dpi": 150,
            "figure.constrained_layout.use": True,
            "font.size": 10,
            "text.color": INK,
            "axes.edgecolor": GREY,
            "axes.labelcolor": INK,
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.prop_cycle": cycler(color=COLOURS),
            "grid.color": "#e6eaed",
            "xtick.color": INK,
            "ytick.color": INK,
            "legend.frameon": False,
        }
    )


def show(figure: Figure, caption: str | None = None) -> None:
    """Show a finished figure with its conditions below it.

    As a PNG with a palette: a third of the size that it has without one.
    """
    if caption is not None:
        figure.supxlabel(caption, x=0.01, ha="left", fontsize=8, color="#5b6b78")
    whole, small = io.BytesIO(), io.BytesIO()
    figure.savefig(whole, format="png", dpi=plt.rcParams["figure.dpi"], bbox_inches="tight")
    plt.close(figure)
    picture = Image.open(whole).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    picture.save(small, format="png", optimize=True)
    width = round(picture.width * 96 / plt.rcParams["figure.dpi"])  # browsers count 96 to an inch
    display(Shown(data=small.getvalue(), format="png", width=width))


def drawing(axes: Axes) -> None:
    """Turn a plot into a sheet to draw on: no axes, and y grows downwards."""
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.invert_yaxis()
