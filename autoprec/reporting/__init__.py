"""Turns results and events into what people read. Decides nothing."""
