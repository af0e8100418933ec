"""Helpers without a domain: processes, results files, profiler ranges."""
