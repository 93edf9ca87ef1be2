"""What is inside a library: read from the library and its manifest, without running it and without a GPU."""

from tvmflow.audit.examination import Audit, check, check_library, check_numerics, examine, summary

__all__ = ["Audit", "check", "check_library", "check_numerics", "examine", "summary"]
