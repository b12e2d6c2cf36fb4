"""Preparing text on several machines, as tasks on Ray whose results meet in a folder that all of
them see.
"""
