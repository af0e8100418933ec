"""Helpers for any part: processes, results files, flags, log lines, patches, profiler ranges."""
