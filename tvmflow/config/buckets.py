"""The config of each bucket's library."""

from __future__ import annotations

from collections.abc import Mapping

from tvmflow.config.sections import Config
from tvmflow.frozen import evolve


def per_bucket(config: Config) -> tuple[Config, ...]:
    """The config of each bucket's library, in their order; the config itself where it has none."""
    return tuple(_of_bucket(config, sizes) for sizes in config.shapes.bucket_sizes()) or (config,)


def symbolic(config: Config) -> Config:
    """The config without its buckets: their dimensions stay open."""
    return evolve(config, shapes=evolve(config.shapes, buckets=(), allow_padding=()))


def _of_bucket(config: Config, sizes: Mapping[str, int]) -> Config:
    open_ = symbolic(config)
    shapes = evolve(open_.shapes, dims={**config.shapes.dims, **sizes})
    dims = {name: tried for name, tried in config.verify.dims.items() if name not in sizes}
    prepack = "shared" if config.shapes.one_layout and config.graph.prepack else config.graph.prepack
    return evolve(
        open_,
        shapes=shapes,
        graph=evolve(config.graph, prepack=prepack),
        verify=evolve(config.verify, dims=dims, inputs=None),
    )
