"""The formats of input files: a class for each, and a line in `millrace.text.inputs` to find its
files.

Others can be used as well: `find_inputs(..., format=MyFormat())`.
"""
