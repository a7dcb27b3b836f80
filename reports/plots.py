"""What pages with plots share: their colors, empty figures, menus, and one HTML file that opens offline."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

COLORS = ("#3b6fb6", "#c2571a", "#3f8f5b", "#8a5aa8", "#b03a48", "#6b7280", "#1a8a99", "#a67c00")


def rendered(template: str, view: Mapping[str, Any], plots: Sequence[tuple[str, str, str, go.Figure | None]]) -> str:
    """Render a page with plots, each a key, a title, a sentence and a figure; those without a figure are left out."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    drawn = [(key, title, about, figure.to_json()) for key, title, about, figure in plots if figure is not None]
    return environment.get_template(template).render(view=view, plots=drawn, plotly=get_plotlyjs())


def text_of(value: object) -> str:
    """Escape text for plotly, which interprets some HTML tags."""
    return html.escape(str(value), quote=False)


def empty(x: str, y: str, **layout: Any) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        xaxis_title=x,
        yaxis_title=y,
        margin={"l": 60, "r": 20, "t": 56, "b": 48},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13},
        hovermode="closest",
        **{"legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"}, "height": 420, **layout},
    )
    return figure


def chosen(figure: go.Figure, groups: Sequence[str], of: Sequence[str]) -> go.Figure:
    """Add a menu that shows the traces of one group; ``of``: the group of each trace."""
    buttons = [
        {"label": text_of(group), "method": "update", "args": [{"visible": [one == group for one in of]}]}
        for group in groups
    ]
    for trace, group in zip(figure.data, of, strict=True):
        trace.visible = bool(groups) and group == groups[0]
    if len(groups) > 1:
        menu = {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "showactive": True}
        figure.update_layout(updatemenus=[menu])
    return figure
