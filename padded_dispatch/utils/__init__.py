"""Helpers without a domain: processes, results files, lines of the log, profiler ranges."""
