"""The headline models without a tuning database: default schedules alone. See headline.py."""

from __future__ import annotations

import headline

if __name__ == "__main__":
    headline.main(None)
