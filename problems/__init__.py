"""Allocation problems with their origin, and the scripts that write them again byte for byte."""
