"""Artifacts with shape buckets: how they are made and proved. What runs them is `runtime.bucket_session`."""
