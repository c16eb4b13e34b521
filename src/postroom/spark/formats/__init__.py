"""Typed reading: the values of messages as columns, instead of bytes.

`typed` says what may be written, settles it on the driver and reads with it on executors; each format is a
module that gives the type of the column and a parser of single values. `arrow` makes columns of what a parser
gives, and finds the values that do not fit.
"""
