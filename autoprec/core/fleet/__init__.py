"""Decides on several devices at once: which are of one type, what their profiles say together."""
