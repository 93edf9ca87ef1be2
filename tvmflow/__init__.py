"""From a trained model to a tuned, verified, auditable library."""

__version__ = "0.1.0"
