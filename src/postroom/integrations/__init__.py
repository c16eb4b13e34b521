"""Postroom in web frameworks: FastAPI, Flask and Django, one module each, imported by name.

They decide nothing about messages: they say where a connection comes from, and when it is opened and closed.
"""
