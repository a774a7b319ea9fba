"""Stats and events of the training process: recording, aggregation and delivery to handlers.

Importing the package needs only the standard library.
"""
