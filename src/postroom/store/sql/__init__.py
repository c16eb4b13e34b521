"""The store on any SQL database: the same verbs on every dialect."""
