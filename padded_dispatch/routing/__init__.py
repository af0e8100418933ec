"""Routing decisions of one source: which rows it keeps, and the plan that numbers them.

Letters: see `padded_dispatch.config`.
"""
