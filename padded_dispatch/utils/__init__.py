"""What has no home of its own: processes, results files, profiler ranges, test routings."""
