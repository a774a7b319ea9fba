"""Handlers of events that come with the package, one file each; none is loaded before it is imported.

Any callable that takes an `Event`, and any object with `handle(event)`, is a handler too.
"""
