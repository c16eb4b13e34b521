"""Pins: what users, other programs and stored data rely on, written down so that no change of it goes unseen.

    public_names    what can be imported, with signatures, fields, members and codes of errors
    command_help    `--help` of every command
    frames          the bytes of every request and reply of the wire protocol
    schema_*        the tables as they are made on each database
    metrics         names, types and labels of metrics
    http_api        paths, methods and schemas of the HTTP API
    names           settings, limits, permissions, environment variables, loggers
    citations       how often the source cites each invariant and each requirement

Each is a file in `snapshots/`. `python -m tests.pins renew` writes them anew, or only those that are named.
What a pin reads of the package's inside it gets from `internals`, and from nowhere else.
"""
