"""Scripts that `bisect` copies into a reproducer's folder; each shows by itself what is wrong."""
