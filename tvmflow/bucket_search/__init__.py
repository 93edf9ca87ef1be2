"""From a model and a file of observed sizes to the shape buckets that should serve them fastest."""

from tvmflow.bucket_search.proposal import Check, Found, Request, plain, propose, toml

__all__ = ["Check", "Found", "Request", "plain", "propose", "toml"]
