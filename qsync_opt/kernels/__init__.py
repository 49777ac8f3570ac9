"""Quantisation, scaled products and bucket codes: what the low-precision layers compute with.

`reference` is the meaning of every function in plain torch; `library` runs the same functions
as fast as the device at hand allows.
"""
