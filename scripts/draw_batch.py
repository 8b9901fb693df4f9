"""Draws ``examples/global_batch.svg``: a global batch on its way to three ranks.

python scripts/draw_batch.py
"""

from __future__ import annotations

from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "examples" / "global_batch.svg"
COLORS = ("#4c78a8", "#f58518", "#54a24b")
PARTS = (range(3), range(3, 6), range(6, 8))  # eight samples over three ranks


def box(x: float, y: float, sample: int, color: str) -> str:
    """A sample."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="34" height="34" rx="5" fill="{color}"/>'
        f'<text x="{x + 17:g}" y="{y + 23:g}" fill="#fff" text-anchor="middle">{sample}</text>'
    )


def label(x: float, y: float, text: str, anchor: str = "middle") -> str:
    """A line of text, grey, as it stands on white and on black."""
    return f'<text x="{x:g}" y="{y:g}" fill="#777" text-anchor="{anchor}">{text}</text>'


def drawing() -> str:
    """The picture, as SVG."""
    shapes = [label(360, 22, "your loader, written for one process: a global batch of 8 samples")]
    for rank, (part, color) in enumerate(zip(PARTS, COLORS, strict=True)):
        left = 130 + 230 * rank - 19 * len(part)
        shapes += [box(204 + 40 * sample, 36, sample, color) for sample in part]
        start, end = 204 + 40 * part[0] + 20 * len(part) - 3, 127 + 230 * rank
        shapes.append(f'<path d="M{start:g} 76 C{start:g} 110 {end} 90 {end} 122" stroke="{color}" fill="none"/>')
        shapes += [box(left + 40 * place, 128, sample, color) for place, sample in enumerate(part)]
        shapes.append(label(end, 186, f"rank {rank}: its part, on its device"))
    shapes.append(label(360, 218, "the same step on every rank, until all data was delivered, each sample once"))
    body = "\n".join(shapes)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 230" font-family="sans-serif" font-size="14"'
        f' role="img" stroke-width="0">\n<g stroke-width="2" stroke="none">\n{body}\n</g>\n</svg>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(drawing())
