"""Reports as one HTML page that needs nothing else."""

import io
import json
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from resswap.version import __version__

from .figures import draw

if TYPE_CHECKING:
    from .report import Report

# The browser is told to load nothing, so what the page shows is in it; the heat maps are images in the SVG.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0; }
th, td { padding: .2em .7em; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1em 0; } figure svg { width: 100%; height: auto; }
dt { font-weight: 600; } dd { margin: 0 0 .4em 1em; }
"""
_WORDS = {
    "input, output, streams": "Root mean squares: of the branch's input and output, and of all streams (or sources, "
    "the earlier contributions that attention residuals pick from) before the branch.",
    "spread": "How far the streams are from their mean, relative to their size; 0 if they are all alike.",
    "entropy, dominance": "Of the weights with which a branch reads the streams, or writes to them, as shares of "
    "their sum: entropy relative to that of equal shares, and the largest share.",
    "DS error": "Distance from doubly stochastic: how far a row or column sum of a mixing matrix is from 1, at most.",
    "gain": "Largest row sum (forward, →) and column sum (backward, ←) of absolute values of the product of all "
    "mixing matrices so far; 1 if they are all doubly stochastic.",
    "gradient": "Norm of the gradient of the loss by the branch's output.",
}


def page(reports: Sequence["Report"]) -> str:
    """The text of the page.

    Raises:
        ImportError: matplotlib is not installed.
    """
    parts = [_section(report) for report in reports]
    words = "".join(f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in _WORDS.items())
    # In a block that is not run as code, only what ends it has to be masked.
    data = json.dumps([report.to_dict() for report in reports], allow_nan=False).replace("</", "<\\/")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(reports[0].title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Inside the residual connections</h1>
<figure>{_svg(reports)}</figure>
<h2>In a few numbers</h2>
{_summaries(reports)}
{"".join(parts)}
<h2>What the words mean</h2>
<dl>{words}</dl>
<p>Made with resswap {__version__}.</p>
<script type="application/json" id="data">{data}</script>
</body>
</html>
"""


def _section(report: "Report") -> str:
    options = ", ".join(f"{name}={value}" for name, value in report.options.items()) or "none"
    return f"<h2>{escape(report.title)}</h2>\n<p>Options: {escape(options)}.</p>\n{_table(report.rows())}\n"


def _summaries(reports: Sequence["Report"]) -> str:
    summaries = [report.summary() for report in reports]
    names = dict.fromkeys(name for found in summaries for name in found)
    cells = [[f"{found[name]:.4g}" if name in found else "" for found in summaries] for name in names]
    rows = [[name, *values] for name, values in zip(names, cells, strict=True)]
    return _table([["", *(report.scheme for report in reports)], *rows])


def _table(rows: list[list[str]]) -> str:
    head, *body = rows
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>\n{lines}\n</tbody></table>"


def _svg(reports: Sequence["Report"]) -> str:
    figure, text = draw(reports), io.StringIO()
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "resswap"}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return "<svg" + text.getvalue().partition("<svg")[2]
