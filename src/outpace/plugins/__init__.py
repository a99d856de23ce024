"""Doors into Outpace from other libraries."""
