"""Draw residuals.svg, the picture in the README: `python docs/figures/residuals.py`.

Depth runs upwards. There is no background, and every colour can be read on white and on black.
"""

from pathlib import Path

GRAY, BLUE, ORANGE, GREEN, PURPLE = "#737c86", "#2778d4", "#c2650c", "#2a8c46", "#9a62d8"
STREAMS = (BLUE, ORANGE, GREEN, PURPLE)
SUBLAYERS = ("attention", "MLP", "attention")
STEP, BOTTOM, TOP = 82, 330, 56


def text(x: float, y: float, content: str, size: int = 13, color: str = GRAY, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" font-weight="{weight}">{content}</text>'


def line(points: str, color: str = GRAY, width: float = 2, arrow: bool = False, opacity: float = 1) -> str:
    end = f' marker-end="url(#{color[1:]})"' if arrow else ""
    return f'<path d="{points}" stroke="{color}" stroke-width="{width}" stroke-opacity="{opacity}" fill="none"{end}/>'


def box(x: float, y: float, content: str, width: float = 84, color: str = GRAY) -> str:
    """A box with its left edge at x, and its middle at y."""
    return (
        f'<rect x="{x}" y="{y - 14}" width="{width}" height="28" rx="7" fill="none" stroke="{color}" '
        f'stroke-width="1.6"/>' + text(x + width / 2, y + 4.5, content, 13, color)
    )


def heads() -> str:
    colors = (GRAY, *STREAMS)
    return "".join(
        f'<marker id="{color[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
        for color in colors
    )


def heights() -> list[float]:
    """Where the sublayers are."""
    return [BOTTOM - 58 - STEP * index for index in range(len(SUBLAYERS))]


def ends(x: float) -> str:
    return box(x - 48, BOTTOM, "embedding", 96) + box(x - 48, TOP - 20, "head", 96)


def plain(x: float) -> str:
    """One stream, which every branch reads, and to which it is added."""
    parts = [ends(x), line(f"M{x} {BOTTOM - 14}V{TOP - 5}", BLUE, 3, arrow=True)]
    for y, name in zip(heights(), SUBLAYERS, strict=True):
        parts += [
            line(f"M{x} {y + 24}H{x + 112}V{y + 15}", arrow=True),
            box(x + 70, y, name),
            line(f"M{x + 112} {y - 14}V{y - 26}H{x + 11}", arrow=True),
            f'<circle cx="{x}" cy="{y - 26}" r="9" fill="none" stroke="{BLUE}" stroke-width="2"/>',
            line(f"M{x - 5} {y - 26}h10M{x} {y - 31}v10", BLUE),
        ]
    return "".join(parts)


def mhc(x: float) -> str:
    """Four streams, mixed at each add; a branch reads a weighted sum of them and writes to all."""
    columns = [x + 20 * (index - 1.5) for index in range(4)]
    pairs = list(zip(columns, STREAMS, strict=True))
    parts = [ends(x)]
    below = BOTTOM - 14
    for index, (y, name) in enumerate(zip(heights(), SUBLAYERS, strict=True)):
        parts += [line(f"M{column} {below}V{y - 19}", color, 3) for column, color in pairs]
        weights = [3.5 if stream == index else 1.2 for stream in range(4)]
        parts += [
            line(f"M{column} {y + 30 - 4 * stream}H{x + 124}", color, weight)
            for stream, ((column, color), weight) in enumerate(zip(pairs, weights, strict=True))
        ]
        parts += [
            line(f"M{x + 124} {y + 33}V{y + 15}", arrow=True),
            box(x + 82, y, name),
            line(f"M{x + 124} {y - 14}V{y - 26}H{x + 46}", arrow=True),
            f'<rect x="{x - 44}" y="{y - 37}" width="88" height="20" rx="5" fill="none" stroke="{GRAY}"/>',
        ]
        parts += [
            line(f"M{start} {y - 19}L{end} {y - 35}", color, 2.2 if start == end else 0.8)
            for start, color in pairs
            for end in columns
        ]
        below = y - 35
    parts += [line(f"M{column} {below}V{TOP - 6}", color, 3) for column, color in pairs]
    return "".join(parts)


def attention_residuals(x: float) -> str:
    """Every output is a source of its own; a branch reads a learned weighted sum of all earlier ones."""
    spots = [BOTTOM - 29, *(y - 26 for y in heights())]
    weights = [[3], [1.4, 3], [3, 1.2, 2], [1.2, 1.4, 2, 3]]
    targets = [*heights(), TOP - 20]
    parts = [ends(x)]
    for target, row in zip(targets, weights, strict=True):
        is_head = target == targets[-1]
        for spot, weight, color in zip(spots, row, STREAMS, strict=False):
            if is_head:
                bend = 14 + (spot - target) * 0.32
                path = f"M{x - 8} {spot}C{x - 8 - bend} {spot} {x - 8 - bend} {target + 46} {x - 20} {target + 15}"
            else:
                path = f"M{x + 9} {spot}C{x + 50} {spot} {x + 30} {target + 2} {x + 68} {target + 2}"
            parts.append(line(path, color, weight, arrow=True))
    for y, name, color in zip(heights(), SUBLAYERS, STREAMS[1:], strict=True):
        parts += [box(x + 70, y, name), line(f"M{x + 112} {y - 14}V{y - 26}H{x + 11}", color, 2, arrow=True)]
    parts += [
        f'<circle cx="{x}" cy="{spot}" r="8" fill="{color}"/>' for spot, color in zip(spots, STREAMS, strict=True)
    ]
    return "".join(parts)


def picture() -> str:
    panels = [
        (plain, 98, "residual", "every output is added to one stream"),
        (mhc, 412, "mhc", "n streams, mixed at every add"),
        (attention_residuals, 758, "attnres", "a sublayer picks among all earlier outputs"),
    ]
    body = "".join(
        draw(x) + text(x + 44, 374, name, 17, GRAY, "bold") + text(x + 44, 396, what, 13)
        for draw, x, name, what in panels
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 408" font-family="system-ui, sans-serif" '
        'text-anchor="middle" role="img"><title>The plain residual, hyper-connections with several streams, and '
        f"attention residuals</title><defs>{heads()}</defs>{body}</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
