"""Searches schedules for tasks: candidates from MetaSchedule, measured by workers of our own."""
