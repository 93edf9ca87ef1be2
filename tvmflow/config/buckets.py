"""The config of each bucket's library."""

from __future__ import annotations

from collections.abc import Mapping

from tvmflow.config.sections import Config


def per_bucket(config: Config) -> tuple[Config, ...]:
    """The config of each bucket's library, in their order; the config itself where it has none."""
    return tuple(_of_bucket(config, sizes) for sizes in config.shapes.bucket_sizes()) or (config,)


def symbolic(config: Config) -> Config:
    """The config without its buckets: their dimensions stay open."""
    return config.model_copy(update={"shapes": config.shapes.model_copy(update={"buckets": (), "allow_padding": ()})})


def _of_bucket(config: Config, sizes: Mapping[str, int]) -> Config:
    open_ = symbolic(config)
    shapes = open_.shapes.model_copy(update={"dims": {**config.shapes.dims, **sizes}})
    dims = {name: tried for name, tried in config.verify.dims.items() if name not in sizes}
    prepack = "shared" if config.shapes.one_layout and config.graph.prepack else config.graph.prepack
    return open_.model_copy(
        update={
            "shapes": shapes,
            "graph": config.graph.model_copy(update={"prepack": prepack}),
            "verify": config.verify.model_copy(update={"dims": dims, "inputs": None}),
        }
    )
