"""Routing, of one source by itself: the rows that it keeps, and their numbers.

Letters: see `padded_dispatch.config`.
"""
