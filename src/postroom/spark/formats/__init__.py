"""Typed reading: the values of messages as columns, instead of bytes.

`options` says what may be written, `typed` settles it on the driver and reads with it on executors; each
format is a module that gives the type of the column and a parser of single values. `arrays` makes columns
of what a parser gives, and finds the values that do not fit.
"""
