"""Proves that recipes train like float32, and finds their loss scale and float32 islands."""
