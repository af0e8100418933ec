"""Routing, of one source by itself: the rows that it keeps, and their numbers."""
