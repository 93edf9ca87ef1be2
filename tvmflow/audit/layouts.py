"""Layouts: the transposes of a graph before and after the passes, and those that it could do without."""

from __future__ import annotations

from collections.abc import Iterator

from tvmflow.manifest import Finding, Layout


def findings(layout: Layout) -> Iterator[Finding]:
    """A fault for each transpose that others undo, a warning where an operator between would have to change."""
    for transform in layout.transforms:
        reason = transform.needless or transform.avoidable
        if reason:
            shape = "x".join(map(str, transform.shape))
            yield Finding(
                check="layouts",
                level="fault" if transform.needless else "warning",
                place=transform.place,
                what=f"needless, it writes {transform.size_bytes:,} bytes ({shape}): {reason}",
                action="take both out of the model, or try another graph.layout",
            )
